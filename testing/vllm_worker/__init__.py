"""vLLM's HTTP API over the arithmetic model: the tokens of this worker are predictable, and it can be made to fail."""
