"""The dialects of ranktables, one module each. All read their documents into one common model; some also write them."""
