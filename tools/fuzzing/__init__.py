"""Malformed inputs of every kind, made from valid samples by counted randomness, and the judge of what becomes of them.

`tools/fuzz.py` is the command. A case is (kind, seed) and nothing else: the same pair makes the same files and words.
"""
