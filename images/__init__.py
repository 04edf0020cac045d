"""How prompts represent images: the tokens of each family of vision models, the allowed image files, digests."""
