"""The record of a run's rollouts: Parquet tables, with their writers, readers and queries."""
