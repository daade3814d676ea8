"""`posttrain view`: a run in a browser, from its curves down to the numbers of a single token."""
