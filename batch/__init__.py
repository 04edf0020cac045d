"""Run a file of requests against something that answers them: an app in this process or a live server."""
