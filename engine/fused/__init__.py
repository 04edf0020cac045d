"""Whole networks of the Llama family on native kernels, held against the network they replace."""
