"""Additions to the tokenizers library for scheduler/tokens.py."""
