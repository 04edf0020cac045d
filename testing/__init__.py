"""A fake of each layer for tests and benchmarks; the product loads only that of `--engine fake`, by its name."""
