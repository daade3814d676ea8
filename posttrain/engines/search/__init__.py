"""Search for a reply at inference: algorithms, and the engine that runs them."""
