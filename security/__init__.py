"""Which peers a process accepts: the cluster secret and its proofs, nonces, trusted addresses, mutual TLS."""
