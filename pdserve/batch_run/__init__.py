"""`pdserve run-batch`: its request, files, backend, progress and interruption."""
