"""The model as arithmetic on real pools: every correct token is known in advance."""
