"""Responses that the Responses API keeps: the interface, and the sqlite file that implements it."""
