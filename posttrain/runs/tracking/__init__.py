"""Experiment trackers: each runs in its own process, which follows the record in the run's folder."""
