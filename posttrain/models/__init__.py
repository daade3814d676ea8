"""Models and tokenizers: what turns tokens into hidden states, and text into tokens and back."""
