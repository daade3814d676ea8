"""Rollout engines: what samples. The protocol is `posttrain.core.protocols.Engine`."""
