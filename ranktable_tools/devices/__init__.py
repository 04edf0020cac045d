"""What accelerators this machine has: kinds, tools, and the parsers of their recorded answers."""
