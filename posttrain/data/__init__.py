"""Data: from files and datasets to tasks, and from transcripts to packed micro-batches."""
