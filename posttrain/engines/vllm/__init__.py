"""vLLM's own server as a rollout engine."""
