"""The HTTP API: one module per endpoint or per step of handling a request."""
