"""The commands that train or evaluate, one module each."""
