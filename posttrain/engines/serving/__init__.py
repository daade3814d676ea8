"""HTTP server of a policy: token ids in and out, and OpenAI's API on top."""
