"""The names by which pods, parts and tables find each other."""

PART_FILE = "part.json"
TABLE_FILE = "global_ranktable.json"
TABLE_KEY = "global_ranktable.json"
"""The key of the table in its ConfigMap, and its file's name where it is mounted or copied to."""
