"""The dialects of ranktables, one module each. A module reads documents into one common model, and may write them."""
