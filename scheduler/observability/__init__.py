"""What becomes known of requests: metrics under our names and vLLM's, one log line each, traces, the ledger."""
