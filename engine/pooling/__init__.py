"""Vectors and scores in place of text: how hidden states become one, and the models that do nothing else."""
