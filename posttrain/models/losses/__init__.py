"""Log-probabilities, entropies and divergences, computed over blocks of the vocabulary."""
