"""GGUF files, llama.cpp's format: one file with weights, often quantized, the tokenizer and the chat template."""
