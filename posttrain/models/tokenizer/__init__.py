"""Text to tokens and back, chat templates, and tool calls."""
