"""What processes say to each other: types, messages, errors, KV layout, and the seam scheduler/instance."""
