"""The module paths by which vLLM's users start things: `python -m pdserve.entrypoints...`."""
