"""`ranktable doctor`: small checks of this host and its connections to the others, each with a next step."""
