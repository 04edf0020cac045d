"""Whole networks of the Llama family on native kernels, checked against the network they replace."""
