"""How images stand in prompts: the tokens of each family of vision models, the allowed image files, digests."""
