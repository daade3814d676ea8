"""Rollout engines, which sample replies. Their protocol is `posttrain.core.protocols.Engine`."""
