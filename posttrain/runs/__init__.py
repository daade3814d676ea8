"""What a run leaves in its directory, and what a person sees of it."""
