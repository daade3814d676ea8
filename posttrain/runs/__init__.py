"""The files that a run writes into its folder, and its output on the terminal."""
