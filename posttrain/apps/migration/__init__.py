"""Recipes from the commands, configurations and scripts of TRL, verl and OpenRLHF. Nothing of theirs is run."""
