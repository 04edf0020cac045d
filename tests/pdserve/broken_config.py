"""Every `--config` file that is refused, as data, tried with `ranktable gen`: each command reads it alike."""

from collections.abc import Mapping
from typing import Any

from pdserve import ranktable_command
from tests.docs.broken_input import Broken, Command

_COMMAND = Command(ranktable_command.main, "ranktable: ")
_FILE = "cluster.yaml"
_GEN = ("gen", "--config", _FILE)


def _row(what: str, text: str, *words: str, files: Mapping[str, Any] | None = None) -> Broken:
    return Broken(what, None, {_FILE: text} if files is None else files, words or _GEN, _COMMAND)


FILES = (
    _row("the file does not exist", "", files={}),
    _row("`--config` without a file", "", "gen", "--config"),
    _row("two files", "", *_GEN, "--config=other.yaml"),
    _row("not YAML", "ip: [10.0.0.18\nsave-dir: tables\n"),
    _row("a list instead of a mapping", "- ip: 10.0.0.18\n"),
    _row("two documents", "ip: 10.0.0.18\n---\nsave-dir: tables\n"),
    _row("a key is unknown", "ip: 10.0.0.18\nprefil-server-list: 4,5\n"),
    _row("a duplicate key", "save-dir: a\nip: 10.0.0.18\nsave_dir: b\n"),
    _row("a key has no value", "ip:\n"),
    _row("an alias, as in an alias bomb", "ip: &a 10.0.0.18\nsave-dir: *a\n"),
    _row("a tag that makes an object", "ip: !!python/object/apply:os.system [id]\n"),
    _row("a mapping in a value", "ip:\n  address: 10.0.0.18\n"),
    _row("a list for one value", "ports: [8088, 8089]\n"),
    _row("a switch that is neither true nor false", "api-server: maybe\n"),
    _row("a value that is not one of those allowed", "device-type: tpu\n"),
    _row("a file of more than 64 KiB", "#" * 70_000),
)

SECTIONS: Mapping[str, tuple[Broken, ...]] = {"`--config FILE`, with any command": FILES}
