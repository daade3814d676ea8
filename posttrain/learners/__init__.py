"""Learners: what holds the weights, scores batches and improves. See `posttrain.core.protocols.Learner`."""
