"""The HTTP surface, one file a protocol."""
