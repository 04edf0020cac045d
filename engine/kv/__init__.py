"""Blocks of KV pools: references, names for prefix caching, and copies in the swap area."""
