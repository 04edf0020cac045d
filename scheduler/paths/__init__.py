"""How one plan is executed: one module per path."""
