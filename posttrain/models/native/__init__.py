"""The native decoder: attention, linear layers, and the compiled code below them."""
