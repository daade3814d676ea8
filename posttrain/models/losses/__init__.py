"""Log-probabilities, entropies and divergences over the vocabulary, a block of it at a time."""
