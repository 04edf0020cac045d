"""The flags of all commands: the table of vLLM's flags, `--config cluster.yaml`, and the parser for both."""
