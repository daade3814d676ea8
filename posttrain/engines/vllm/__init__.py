"""The part of server engines that is specific to vLLM."""
