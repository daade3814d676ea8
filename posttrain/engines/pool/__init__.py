"""A pool of engines with the interface of one, which tolerates crashes, hangs and wrong weights."""
