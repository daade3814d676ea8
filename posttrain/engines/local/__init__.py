"""Engines in the learner's process."""
