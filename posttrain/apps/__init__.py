"""Programs on top of runs: view, audit, plan."""
