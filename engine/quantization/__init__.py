"""Quantised checkpoints: which one a folder holds, and its weights in plain floats.

config.json --find_quantization--> layout
Weights (as stored) --DequantisingWeights(layout)--> Weights (plain `<module>.weight`)
"""
