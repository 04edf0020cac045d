"""`ranktable doctor`: checks of this host and of the way to the others, each small, each with what to do next."""
