"""What placement knows of each instance: its load, what was booked on it, which prefixes it holds."""
