"""Learners, which hold the weights, score batches and make updates. See `posttrain.core.protocols.Learner`."""
