"""The cluster's HTTP server and control plane: one process, never torch."""
