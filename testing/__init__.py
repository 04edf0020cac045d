"""The fake of each layer, for tests, benchmarks and `--engine fake`; the product loads only that one, by its name."""
