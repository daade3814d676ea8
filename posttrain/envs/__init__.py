"""Environments: what the model is shown, and what its replies are worth. No torch here.

load    finds a reward or an environment by its name, and reads what it returns
pool    plays it in worker processes with a hard time limit per step
worker  the process at the other end
check   tries it on a few tasks before a run is spent on it
"""
