"""What the scheduler reads of a model: its files but for the weights, its kind, its defaults."""
