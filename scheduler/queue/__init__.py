"""The parts of the cluster's queue: order, cost of a prompt, and capacity."""
