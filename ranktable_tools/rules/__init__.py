"""The rules a ranktable must keep: one small function each, and the list of all."""
