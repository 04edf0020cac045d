"""Kubernetes: pods that write their part of the table, and the writer that makes one table of the parts."""
