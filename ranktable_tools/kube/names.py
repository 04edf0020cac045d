"""The names of files and ConfigMap keys that pods, parts and tables share."""

PART_FILE = "part.json"
TABLE_FILE = "global_ranktable.json"
TABLE_KEY = "global_ranktable.json"
"""The key of the table in its ConfigMap, and the name of its file when mounted or copied."""
