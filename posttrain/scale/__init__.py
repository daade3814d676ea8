"""Many processes: what they share, on torch.distributed."""
