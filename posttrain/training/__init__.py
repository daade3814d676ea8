"""Runs: put together, trained step by step, measured."""
