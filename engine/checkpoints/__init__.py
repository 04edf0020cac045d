"""A model's files: found, checked, turned into safetensors where they are not, and read tensor by tensor."""
