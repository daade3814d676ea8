"""Objectives of training: components with formulas, algorithms built from them, and the tables of algorithms."""
