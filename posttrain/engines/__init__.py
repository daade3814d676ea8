"""Rollout engines: what samples. The protocol is `posttrain.protocols.Engine`."""
