"""Cut a network for the ranks of an instance, and change the forward pass of each rank accordingly."""
