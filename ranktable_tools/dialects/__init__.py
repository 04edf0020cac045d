"""The dialects of ranktables: one module each, which reads a document into the one model and may write it back."""
