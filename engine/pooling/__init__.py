"""Vectors and scores instead of text: pooling of hidden states, and encoder models."""
