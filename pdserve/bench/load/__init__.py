"""Requests to an OpenAI server, when their answers' pieces came, and the figures that follow."""
