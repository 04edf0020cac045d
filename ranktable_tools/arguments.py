"""Parse command lines; an invalid one raises a RanktableError of one line instead of printing a page of usage."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ranktable_tools.dialects.dialect import ReadOptions
from ranktable_tools.dialects.registry import DIALECTS
from ranktable_tools.errors import RanktableError

CONFIG_HELP = "With pdserve installed, --config FILE reads these flags from YAML; flags on the command line win."


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations that raises RanktableError and suggests a flag for a misspelt one."""

    def __init__(self, *, prog: str | None = None, description: str | None = None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse, but check for unknown flags first: a misspelt flag is a common reason why a flag seems missing."""
        words = list(sys.argv[1:] if args is None else args)
        commands = next((one for one in self._actions if isinstance(one, argparse._SubParsersAction)), None)
        if commands is None:
            self._refuse_unknown(words)
        elif words and not words[0].startswith("-") and words[0] not in commands.choices:
            near = difflib.get_close_matches(words[0], commands.choices, n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(commands.choices)}"
            self.error(f"there is no command {words[0]!r}: {advice}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise RanktableError with the message and a hint to --help."""
        raise RanktableError(f"{message} (see {self.prog} --help)")

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        known = self._option_string_actions
        for word in words[: words.index("--") if "--" in words else None]:
            flag = word.partition("=")[0]
            if flag.startswith("--") and " " not in flag and flag not in known:
                near = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
                self.error(f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else ""))


def add_command(commands: "argparse._SubParsersAction[OneLineParser]", name: str, does: str) -> argparse.ArgumentParser:
    """Add one subcommand; `does` describes it in one sentence."""
    return commands.add_parser(name, help=does, description=does, epilog=CONFIG_HELP)


def add_device_lists(parser: argparse.ArgumentParser) -> None:
    """Add the guide's two flags that list instances."""
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-server-list",
            nargs="+",
            action="extend",
            default=[],
            metavar="IDS",
            help=f"{role} instances of this host: device ids separated by commas, instances by spaces",
        )


def add_dialect(parser: argparse.ArgumentParser) -> None:
    """Add --dialect, for a table whose structure does not determine its dialect."""
    *others, last = (dialect.name for dialect in DIALECTS)
    parser.add_argument("--dialect", metavar="NAME", help=f"default: detected; else {', '.join(others)} or {last}")


def add_read_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for facts that some dialects do not contain."""
    parser.add_argument(
        "--num-prefill",
        type=int,
        metavar="N",
        help="kubeinfer, omni-merged and mindie: the first N instances are prefill (OMNI's PREFILL_POD_NUM)",
    )
    parser.add_argument(
        "--devices-per-instance", type=int, metavar="N", help="vllm-ascend: every N devices of a list are one instance"
    )


def read_options(arguments: argparse.Namespace) -> ReadOptions:
    """Return the values of these flags. Raises RanktableError for a number below 1."""
    for name in ("num_prefill", "devices_per_instance"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise RanktableError(f"--{name.replace('_', '-')} is {value}, but must be at least 1")
    return ReadOptions(arguments.num_prefill, arguments.devices_per_instance)


def add_save_dir(parser: argparse.ArgumentParser) -> None:
    """Add the guide's flag for the output folder."""
    parser.add_argument("--save-dir", default=".", metavar="DIR", help="where the files go (default: this folder)")


def add_owner(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the owner of the written files."""
    parser.add_argument(
        "--owner", type=int, metavar="UID", help="owner of the written files: the user in the containers, usually 1000"
    )


def add_ip(parser: argparse.ArgumentParser) -> None:
    """Add the flag that overrides the detected address."""
    parser.add_argument("--ip", help="this host's address (default: detected without contacting another host)")
