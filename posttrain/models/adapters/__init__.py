"""Low-rank adapters, and frozen weights in few bits beneath them."""
