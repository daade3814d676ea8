"""Types, protocols and small helpers that everything above uses. No torch where it can be avoided."""
