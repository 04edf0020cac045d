"""Logs with request ids, and metrics."""
