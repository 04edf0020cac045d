"""What the engine does by libraries for NVIDIA GPUs, beside attention."""
