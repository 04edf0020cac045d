"""Ranktables: read, write, generate, merge, check. Standard library only; imports nothing of pdserve."""
