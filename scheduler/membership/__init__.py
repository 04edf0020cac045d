"""Who belongs to the cluster by its table, and each one's life; scheduler/registry.py puts it together."""
