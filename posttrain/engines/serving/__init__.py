"""HTTP server of a policy: token ids in and out, and the APIs of OpenAI and Anthropic on top."""
