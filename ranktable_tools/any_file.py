"""Read a table file of any dialect, detected from its structure or given by name."""

from dataclasses import dataclass

from ranktable_tools.dialects.dialect import Dialect, ReadOptions
from ranktable_tools.dialects.registry import detect, named
from ranktable_tools.document import Node, Problem
from ranktable_tools.errors import RanktableError
from ranktable_tools.json_file import read_json
from ranktable_tools.reading import TableReading
from ranktable_tools.rules.catalogue import errors
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.table_file import refusal


@dataclass(frozen=True, slots=True)
class ReadFile:
    """One file as read, valid or not: its document, its dialect, and the problems found while reading."""

    path: str
    document: Node
    dialect: Dialect
    reading: TableReading

    @property
    def problems(self) -> list[Problem]:
        """The problems found while reading; rules over the whole table are not checked yet."""
        return self.document.problems


def open_table(path: str, dialect_name: str | None = None, options: ReadOptions = ReadOptions()) -> ReadFile:
    """Read one file. Raises RanktableError naming the file if it is not JSON, or `dialect_name` is unknown.

    Without `dialect_name`, it also raises if the file does not match exactly one dialect.
    """
    document = read_json(path)
    try:
        dialect = detect(document) if dialect_name is None else named(dialect_name)
    except RanktableError as error:
        raise RanktableError(
            f"{path}: {error}", code=error.code, json_path=error.json_path, value=error.value
        ) from error
    root = Node(document, "", [])
    return ReadFile(path, root, dialect, dialect.read(root, options))


def read_table(
    path: str,
    dialect_name: str | None = None,
    options: ReadOptions = ReadOptions(),
    rules: RuleOptions = RuleOptions(),
) -> ReadFile:
    """Read one file that must be valid. Raises RanktableError naming file, place and value."""
    opened = open_table(path, dialect_name, options)
    problems = [*opened.problems, *errors(opened.reading, rules, opened.problems)]
    if problems:
        raise refusal(path, problems)
    return opened
