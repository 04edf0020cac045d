"""The decode half of an instance: reserving, receiving, admission."""
