"""Metrics under pdserve's and vLLM's names, a log line per request, traces, and counts of finished requests."""
