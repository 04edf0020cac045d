"""What differs between devices, and nothing else of the product: one file per kind."""
