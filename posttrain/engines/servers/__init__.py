"""Inference servers over HTTP as rollout engines: the part that vLLM and SGLang share."""
