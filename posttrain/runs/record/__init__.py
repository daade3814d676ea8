"""The record of every rollout of a run: tables of Parquet, with their writers, readers and queries."""
