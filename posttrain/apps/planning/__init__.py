"""Throughput forecast for other machines, from the files of a pilot run."""
