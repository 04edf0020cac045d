"""Offline use: the class LLM, a client of the same HTTP surface that servers have, with or without a socket."""
