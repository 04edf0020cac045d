"""Responses that the Responses API stores: the interface, and the sqlite file that implements it."""
