"""Models, which turn tokens into hidden states, and tokenizers, which turn text into tokens and back."""
