"""Runs in a terminal: a page of one, a table of many, two side by side."""
