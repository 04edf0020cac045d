"""Replace modules of a loaded network by ops of its device, for any kind of device."""
