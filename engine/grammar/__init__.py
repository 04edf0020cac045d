"""Structured output: what the tokens of a sequence may be, so that its text is of a schema, regex or grammar."""
