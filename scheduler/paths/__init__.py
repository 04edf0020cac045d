"""How one plan is run: one file a path."""
