"""Aphrodite's module paths of commands: `python -m pdserve.endpoints...`."""
