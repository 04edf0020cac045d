"""The engine's use of libraries for NVIDIA GPUs, apart from attention."""
