"""Where training steps come from: rollouts or rows in, weighted micro-batches out."""
