"""Instances and networks that answer by rules instead of a model."""
