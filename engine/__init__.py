"""The engine: paged KV, continuous batching, sampling, on torch and transformers. Importing it loads no torch."""
