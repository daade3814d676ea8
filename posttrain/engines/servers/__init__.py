"""Inference servers over HTTP as rollout engines: what is the same for vLLM and SGLang."""
