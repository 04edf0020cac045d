"""KV links between instances, as an operator asks for them and as metrics show them."""
