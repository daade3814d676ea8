"""Several engines behind one: crashes, hangs and wrong weights are tolerated."""
