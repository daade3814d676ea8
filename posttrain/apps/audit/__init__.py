"""Looks for reward hacking in what a run has left behind: `posttrain audit RUN`."""
