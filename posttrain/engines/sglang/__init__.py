"""SGLang's own server as a rollout engine: what is SGLang's alone."""
