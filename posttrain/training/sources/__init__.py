"""Sources of training steps: rollouts or rows in, weighted micro-batches out."""
