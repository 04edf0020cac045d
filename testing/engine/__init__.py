"""The model as arithmetic on real pools: what each token must be is known."""
