"""Attention over the paged pool: one interface, several backends, registered with transformers as one function."""
