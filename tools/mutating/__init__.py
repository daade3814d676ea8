"""Small mistakes put into the package one at a time, and whether a test notices. See `tools/mutants.py`."""
