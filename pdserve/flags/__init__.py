"""The flags of all commands: one table of vLLM's, `--config cluster.yaml`, and the parser that takes both."""
