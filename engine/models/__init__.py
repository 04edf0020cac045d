"""What pdserve knows of model families beyond their config in transformers."""
