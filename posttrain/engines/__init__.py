"""Rollout engines: what samples. `engine.py` is the protocol (see posttrain.types.Engine)."""
