"""Recipes from the commands, configurations and scripts of TRL, verl and OpenRLHF. None of them is run."""
