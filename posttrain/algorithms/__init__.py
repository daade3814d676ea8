"""Objectives: what a reward teaches. Parts hold the ideas; `policy.py` makes a row of them, `table.py` lists the rows."""
