"""The front door without a cluster: requests answered by a script."""
