"""Environments: prompts for the policy, and rewards for its replies. Imports no torch.

load    finds a reward or an environment by its name, and checks its return values
pool    runs it in worker processes with a hard time limit per step
worker  the process at the other end
check   tries it on a few tasks before a run is spent on it
"""
