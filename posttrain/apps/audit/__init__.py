"""A search for reward hacking in the files of a run: `posttrain audit RUN`."""
