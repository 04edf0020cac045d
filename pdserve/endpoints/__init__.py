"""The module paths by which Aphrodite's users start things: `python -m pdserve.endpoints...`."""
