"""Parsers of the formats in which models write calls, one file each, and their names for --tool-call-parser."""
