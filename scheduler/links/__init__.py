"""Measurement and metrics of the KV links between instances."""
