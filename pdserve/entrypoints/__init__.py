"""vLLM's module paths of commands: `python -m pdserve.entrypoints...`."""
