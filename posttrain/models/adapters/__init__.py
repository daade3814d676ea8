"""Low-rank adapters, and frozen weights in few bits below them."""
