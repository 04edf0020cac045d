"""General rules of the command line: help, versions, suggestions, exit statuses, no heavy imports."""

import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from pdserve import __version__
from pdserve.bench.command import BENCHMARKS
from pdserve.cli import COMMANDS, main
from pdserve.flags.parser import CommandParser, take_config
from pdserve.guarded import guarded
from ranktable_tools import cli as ranktable
from ranktable_tools import guide
from ranktable_tools.errors import RanktableError
from wire.errors import ConfigError, Incompatible, Unavailable


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0

    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in COMMANDS)


class _Parsed(Exception):
    """Raised where a command would start its work."""


def _examples(text: str, start: str) -> list[list[str]]:
    """Return the words of each line that begins with `start`, without its comment, pipe or redirection."""
    lines = re.findall(rf"^  (?:\w+\$ )?{start} (\S.*)$", text, re.MULTILINE)
    return [shlex.split(re.split(r"  |\| |> ", line)[0]) for line in lines]


@pytest.mark.parametrize("command", ["", *COMMANDS, *(f"bench {name}" for name in BENCHMARKS)])
def test_examples_in_help_are_valid(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = CommandParser.parse_args

    def parse_alone(parser: CommandParser, args: Sequence[str] | None = None) -> None:
        parse(parser, args)
        raise _Parsed

    with suppress(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    examples = _examples(text, "pdserve")
    monkeypatch.setattr(CommandParser, "parse_args", parse_alone)

    assert examples or "examples:" not in text
    for words in examples:
        with pytest.raises(_Parsed):
            main(words)


@pytest.mark.parametrize(
    ("start", "parser", "commands"),
    [
        ("ranktable", ranktable.command_parser, [[], *([name] for name in ranktable.command_parsers())]),
        ("python pd_ranktable_tools.py", guide.command_parser, [[]]),
    ],
)
def test_examples_of_the_ranktable_tools_are_valid(
    start: str, parser: Callable[[], ArgumentParser], commands: Sequence[Sequence[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for command in commands:
        with suppress(SystemExit):
            parser().parse_args([*command, "--help"])

    examples = _examples(capsys.readouterr().out, start)
    assert examples
    for words in examples:
        parser().parse_args(take_config(words)[1])


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdserve {__version__}\n"


def test_a_misspelled_command_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dwon"]) == 2
    assert "did you mean `pdserve down`?" in capsys.readouterr().err


def test_an_unknown_flag_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--prefil", "2", "--model", "x"]) == 2
    assert "did you mean --prefill?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("a\nb"), 2),
        (RanktableError("a b"), 2),
        (Incompatible("a b"), 2),
        (Unavailable("a b"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_one_line_and_a_status(
    error: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert guarded("pdserve x", fail) == status
    expected = "" if isinstance(error, KeyboardInterrupt) else "pdserve x: a b\n"
    assert capsys.readouterr().err == expected


def test_a_server_leaves_with_its_status_output_and_no_cleanup() -> None:
    code = (
        "import atexit; from pdserve.guarded import leave; atexit.register(print, 'cleanup'); print('served'); leave(3)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )

    assert (done.returncode, done.stdout, done.stderr) == (3, "served\n", "")


def test_the_end_of_a_command_walks_no_imported_objects() -> None:
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 100));"
        "from pdserve.guarded import guarded; guarded('pdserve x', lambda: 0)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pdserve.cli import main; main(['--help']);"
        "heavy = {'torch', 'grpc', 'fastapi', 'transformers', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr


_INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a script's background jobs
sys.meta_path.insert(0, CtrlC())
exec(sys.argv.pop(2))
"""
_SCRIPT = "from pdserve.{} import main; sys.exit(main({}))"
_LINKS = _SCRIPT.format("cli", ["links", "--url", "http://127.0.0.1:1"])
_UP = _SCRIPT.format("cli", ["up", "--port", "0"])
_TABLES = _SCRIPT.format("ranktable_command", ["lint", "gone.json"])
_GUIDE = _SCRIPT.format("guide_command", ["--mode", "gen"])
_LAUNCH = "import runpy; runpy.run_module('pdserve.launch', run_name='__main__')"


@pytest.mark.parametrize(
    ("script", "module"),
    [
        (_LINKS, "wire.errors"), (_LINKS, "pdserve.links"), (_UP, "argparse"), (_UP, "pdserve.up_request"),
        (_TABLES, "ranktable_tools.cli"), (_GUIDE, "argparse"), (_LAUNCH, "argparse"),
        (_LAUNCH, "ranktable_tools.launch_plan"),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                (_LINKS, "ranktable_tools.errors"), (_LINKS, "difflib"), (_UP, "typing"), (_TABLES, "argparse"),
                (_TABLES, "ranktable_tools.any_file"), (_GUIDE, "ranktable_tools.guide"),
                (_GUIDE, "ranktable_tools.generate"), (_LAUNCH, "pdserve.flags.parser"),
            )
        ),
    ],
)  # fmt: skip
def test_ctrl_c_while_modules_are_imported_is_quiet(script: str, module: str) -> None:
    command = [sys.executable, "-P", "-c", _INTERRUPTED_WHILE_IMPORTING, module, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
