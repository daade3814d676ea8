"""The environments that ship with posttrain."""
