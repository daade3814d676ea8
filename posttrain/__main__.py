"""`python -m posttrain` is the command `posttrain`."""

from posttrain.cli import entry

entry()
