"""docs/hand-off.md agrees with the code on messages, limits, transports and places in the code."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from kvtransfer import incoming, link_codec, transport_table
from kvtransfer.link_messages import MessageType
from kvtransfer.sender_ticket import SenderState
from kvtransfer.ticket import ReceiverState

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "hand-off.md").read_text(encoding="utf-8")
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without its head."""
    section = re.split(r"^#+ ", TEXT.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.M)[0]
    table = re.search(r"^\|.*(?:\n\|.*)+", section, re.M)
    assert table is not None, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def value_of(file: str, name: str) -> float:
    """Return a number of the code: a module's constant, or the default of a dataclass's field."""
    found, *field = name.split(".")
    value = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), found)
    if field:
        (value,) = [one.default for one in dataclasses.fields(value) if one.name == field[0]]
    assert isinstance(value, int | float)
    return value


def test_every_message_is_listed_with_its_number_and_limit() -> None:
    written = [(int(kind), name, int(limit.replace(",", ""))) for kind, name, _, limit, _ in rows("## The messages")]

    assert written == [(int(kind), kind.name, link_codec._MAX_BODY[kind]) for kind in MessageType]


def test_messages_are_listed_under_the_side_that_sends_them() -> None:
    by_sender = {MessageType[name] for _, name, side, _, _ in rows("## The messages") if side in ("P", "either")}

    assert by_sender - {MessageType.HELLO, MessageType.PROOF, MessageType.SETUP} == set(incoming._FROM_SENDER)


def test_every_limit_equals_that_of_the_code() -> None:
    limits = rows("## Limits and waits")

    assert len(limits) > 20
    for what, value, where in limits:
        place = PLACE.fullmatch(where)
        assert place is not None, where
        assert float(value.replace(",", "")) == value_of(*place.groups()), what


def test_the_fields_of_a_frame_add_up_to_its_bytes() -> None:
    fields = rows("### A frame's bytes")

    assert fields[-1][1] == "4 each"
    assert sum(int(num_bytes) for _, num_bytes, _, _ in fields[:-1]) == link_codec.FRAME_HEAD_BYTES
    assert f"FRAME is {link_codec.FRAME_HEAD_BYTES} bytes" in TEXT


def test_transports_are_listed_best_first_with_links_and_section() -> None:
    table = rows("## The transports")

    assert tuple(name.strip("`") for name, *_ in table) == transport_table.NAMES
    for name, used, _, max_links, _ in table:
        assert int(max_links) == transport_table.TRAITS[name.strip("`")].max_links
        defaults = [
            device for device in ("cpu", "cuda", "npu") if name.strip("`") in transport_table.default_names(device)
        ]
        assert used == {3: "by default", 2: "by default on GPUs and NPUs", 0: "when named"}[len(defaults)]
        assert f"\n### {name.strip('`')}\n" in TEXT


@pytest.mark.parametrize("states", [ReceiverState, SenderState])
def test_every_state_is_drawn(states: type[ReceiverState | SenderState]) -> None:
    drawing = TEXT.partition("## The two state machines")[2].split("```")[1]

    assert all(re.search(rf"\b{state.name}\b", drawing) for state in states)


def test_every_named_place_in_the_code_exists() -> None:
    places = PLACE.findall(TEXT)

    assert len(places) > 40
    for file, name in places:
        assert name in _names(ROOT / file), f"{file}:{name}"


def test_every_freeing_rule_names_a_place_and_a_test() -> None:
    for what, _, when, place, shown in rows("## Who may free what, and when"):
        assert PLACE.search(place), (what, when)
        assert "`tests/" in shown or shown == "(no test)", (what, when)


def _names(path: Path) -> set[str]:
    """Return the names a file defines: functions, classes, `Class.method`, `Class.field` and constants."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= _defined_names(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _defined_names(inner)}
    return found


def _defined_names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [one for target in targets for one in ast.walk(target)]
    return {one.id for one in names if isinstance(one, ast.Name)}
