"""Conversion of text to tokens and back, chat templates, and tool calls."""
