"""Compiled inner loops for processors: C, and what builds and loads it."""
