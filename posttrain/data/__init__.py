"""Data: from files and datasets to rows, and from rows to tasks."""
