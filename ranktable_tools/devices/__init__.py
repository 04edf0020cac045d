"""Detect this machine's accelerators: their kinds, the drivers' tools, and parsers of their output."""
