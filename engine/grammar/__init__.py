"""Structured output: which tokens a sequence may contain, so that its text matches a schema, regex or grammar."""
