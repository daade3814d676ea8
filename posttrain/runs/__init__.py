"""The files that a run leaves in its folder, and its output on the terminal."""
