"""HTTP server of a policy, with an API for token ids and the APIs of OpenAI and Anthropic."""
