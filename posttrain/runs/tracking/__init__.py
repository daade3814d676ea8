"""Experiment trackers: each runs in a process of its own, which follows the record of the run in its folder."""
