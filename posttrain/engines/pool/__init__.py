"""Several engines behind one. Crashes, hangs and wrong weights are tolerated."""
