"""What a run keeps of every rollout: tables of Parquet, how they are written, read and asked."""
