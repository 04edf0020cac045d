"""Kubernetes: pods that each write their part of the table, and a writer that merges the parts."""
