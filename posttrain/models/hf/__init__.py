"""Models computed by transformers, with the same protocol as the native decoder."""
