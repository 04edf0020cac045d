"""What `--engine fake` runs."""
