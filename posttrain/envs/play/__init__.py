"""Runs episodes: environments in worker processes, turns, answers of services."""
