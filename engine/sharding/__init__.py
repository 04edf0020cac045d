"""How a network is cut for the ranks of an instance, and what each rank then does otherwise."""
