"""Send requests to an OpenAI server, time the pieces of the answers, and compute the figures."""
