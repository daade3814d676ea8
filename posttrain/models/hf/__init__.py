"""Models that transformers computes, behind the same protocol as the native ones."""
