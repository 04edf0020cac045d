"""Run a file of requests against a backend: an app in this process or a live server."""
