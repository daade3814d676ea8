"""Child processes, worker threads, HTTP clients, the user's code and folders."""
