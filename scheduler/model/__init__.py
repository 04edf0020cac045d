"""What the scheduler reads of a model: its files except the weights, its kind, its defaults."""
