"""All code that differs between devices, and no other: one file per kind."""
