"""The members of the cluster by its table, and the life cycle of each; used by scheduler/registry.py."""
