"""What the queue of the cluster is made of: whose turn it is, what a prompt costs, how much room is left."""
