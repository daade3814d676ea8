"""The command `posttrain`."""
