"""Compiled inner loops for processors: C sources, and the code that builds and loads them."""
