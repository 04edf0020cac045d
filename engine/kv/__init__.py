"""Blocks of KV pools: who holds them, what they are called, and their copies in the swap area."""
