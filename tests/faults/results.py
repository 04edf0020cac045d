"""Collect the rows of the tables of faults of workers in docs/route.md."""

import os
from pathlib import Path

_RESULTS = "WORKER_FAULT_RESULTS"
"""A file's name here gets a line of Markdown for each row."""


def note(line: str) -> None:
    """Add a row, if a file for them is named."""
    if path := os.environ.get(_RESULTS):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
