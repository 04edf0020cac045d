"""Containers as the guide makes them: the image, the `docker run` line of each role, the paths of its package."""
