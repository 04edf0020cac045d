"""The cluster's HTTP server and control plane: one process, which never imports torch."""
