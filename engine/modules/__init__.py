"""Parts of a loaded network by ops of the device that it lies on, whichever device that is."""
