"""vLLM as a rollout engine, in a separate process."""
