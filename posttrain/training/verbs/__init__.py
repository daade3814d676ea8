"""One module for each command that trains or evaluates."""
