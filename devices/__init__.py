"""All code that differs between devices, and no other code: one file per kind."""
