"""Training: assembly of runs, the training loop, evaluation."""
