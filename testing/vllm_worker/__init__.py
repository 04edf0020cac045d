"""A vLLM worker as HTTP shows it, over the arithmetic model: its tokens can be computed, and it can be made to fail."""
