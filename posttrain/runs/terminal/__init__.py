"""What a person sees of a run on the terminal."""
