"""vLLM's own server as a rollout engine: what is vLLM's alone."""
