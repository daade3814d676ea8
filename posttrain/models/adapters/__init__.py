"""Low-rank adapters, and quantized frozen weights below them."""
