"""A policy behind HTTP: token ids in and out, and OpenAI's forms on top."""
