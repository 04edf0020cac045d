"""Offline use: the class LLM, a client of the server's HTTP API, with or without a socket."""
