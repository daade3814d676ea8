"""Objectives: what a reward teaches. `parts.py` holds the ideas, `policy.py` the table of algorithms made of them."""
