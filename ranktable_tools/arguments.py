"""Parse command lines so that a wrong one is a RanktableError in one line, not a page of usage."""

import argparse
from typing import NoReturn

from ranktable_tools.errors import RanktableError


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations whose errors are RanktableErrors."""

    def __init__(self, *, prog: str | None = None, description: str | None = None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise RanktableError(f"{message} (see {self.prog} --help)")


def add_command(commands: "argparse._SubParsersAction[OneLineParser]", name: str, does: str) -> argparse.ArgumentParser:
    """Add one subcommand and what it does in a sentence."""
    return commands.add_parser(name, help=does, description=does)


def add_device_lists(parser: argparse.ArgumentParser) -> None:
    """Add the guide's two lists of instances."""
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-server-list",
            nargs="+",
            action="extend",
            default=[],
            metavar="IDS",
            help=f"{role} instances of this host: device ids parted by commas, instances by spaces",
        )


def add_save_dir(parser: argparse.ArgumentParser) -> None:
    """Add the guide's folder for the files."""
    parser.add_argument("--save-dir", default=".", metavar="DIR", help="where the files go (default: here)")


def add_ip(parser: argparse.ArgumentParser) -> None:
    """Add the way to overrule the address found."""
    parser.add_argument("--ip", help="this host's address (default: found without asking another host)")
