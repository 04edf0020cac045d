"""Models by the name they have at a hub: found there, and their files fetched into a folder of this machine."""
