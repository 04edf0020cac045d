"""What pdserve knows about model families beyond their config in transformers."""
