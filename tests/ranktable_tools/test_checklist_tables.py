"""Lines 81, 82, 87, 89-98 of the checklist: merge's tables, refusals of lint and start-up, and roles by matching."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ranktable_tools import cli, guide
from ranktable_tools.errors import RanktableError
from ranktable_tools.launch_plan import resolve
from tests.ranktable_tools.documents import A, B, C, Document, group, grouped, local, modelarts, server

Save = Callable[[str, object], str]
Say = pytest.CaptureFixture[str]


def _started(save: Save, document: Document, own: Document) -> str:
    """Return the role of a process that is given these tables, or the message it is refused with."""
    environ = {
        "GLOBAL_RANK_TABLE_FILE_PATH": save("global.json", document),
        "RANK_TABLE_FILE_PATH": save("local.json", own),
        "NODE_PORTS": "8088,8089",
    }
    try:
        return resolve(environ).role
    except RanktableError as error:
        return str(error)


def _linted(save: Save, capsys: Say, document: Document, *flags: str) -> str:
    """Return the one finding of a table; the exit status is 2."""
    path = save("t.json", document)

    assert cli.main(["lint", path, *flags]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    return line.removeprefix(f"{path}: ")


def _merged(folder: Path, *parts: Document) -> int:
    names = []
    for number, part in enumerate(parts):
        names.append(str(folder / f"{number}.json"))
        Path(names[-1]).write_text(json.dumps(part))
    return guide.main(["--mode", "merge", "--global-ranktable-list", *names, "--save-dir", str(folder / "out")])


def _merged_groups(folder: Path) -> list[dict[str, Any]]:
    document = json.loads((folder / "out" / "global_ranktable_merge.json").read_text())
    groups: list[dict[str, Any]] = document["server_group_list"]
    return groups


SCHEDULER_PART = grouped(group(0, server(A)), group(1, server(A, 4, 5)))
DECODE_PART = grouped(group(2, server(B, 6, 7)))


@pytest.mark.covers("A7.81")
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [([server(A, 0)], [server(A, 1)]), ([server(A, 0, 1), server(B, 0, 1)], [server(A, 2, 3), server(B, 2, 3)])],
)
def test_one_scheduler_and_any_number_of_each_role(
    save: Save, capsys: Say, prefill: list[Document], decode: list[Document]
) -> None:
    path = save("t.json", modelarts(prefill, decode))

    assert cli.main(["lint", path]) == 0
    assert cli.main(["show", path]) == 0
    shown = capsys.readouterr().out
    assert f"{len(prefill)} prefill, {len(decode)} decode" in shown
    assert shown.count("scheduler  192.0.2.1") == 1


@pytest.mark.covers("A11.18", "A7.82")
@pytest.mark.parametrize("mode", ["bake", "Merge", "merge_local", ""])
def test_another_mode_is_a_usage_error(capsys: Say, mode: str) -> None:
    assert guide.main(["--mode", mode]) == 2
    assert "argument --mode: invalid choice" in capsys.readouterr().err


@pytest.mark.covers("A7.87")
@pytest.mark.parametrize("files", [[], ["a.json"]])
def test_merge_needs_two_tables(capsys: Say, files: list[str]) -> None:
    flags = ["--global-ranktable-list", *files] if files else []

    assert guide.main(["--mode", "merge", *flags]) == 2
    assert "Ensure that there are two global ranktable for merge mode." in capsys.readouterr().err


@pytest.mark.covers("A7.89")
def test_merge_concatenates_in_argument_order_and_recounts(tmp_path: Path) -> None:
    parts = [grouped(group(1, server(C, 1), server(C, 0))), SCHEDULER_PART, DECODE_PART]

    assert _merged(tmp_path, *parts) == 0

    groups = _merged_groups(tmp_path)
    assert [(entry["group_id"], entry["server_count"]) for entry in groups] == [("0", "1"), ("1", "3"), ("2", "1")]
    assert groups[1]["server_list"] == [server(C, 1), server(C, 0), server(A, 4, 5)]


@pytest.mark.covers("A7.90")
@pytest.mark.parametrize(
    "parts",
    [
        [SCHEDULER_PART, grouped(group(0, server(B)), *DECODE_PART["server_group_list"])],
        [grouped(group(1, server(A, 4, 5))), DECODE_PART],
    ],
)
def test_no_scheduler_or_two_of_them_write_nothing(tmp_path: Path, capsys: Say, parts: list[Document]) -> None:
    assert _merged(tmp_path, *parts) == 2

    assert not (tmp_path / "out").exists()
    assert "group_id 0" in capsys.readouterr().err


@pytest.mark.covers("A7.91")
def test_a_device_in_two_instances_is_refused_unless_shared(save: Save, capsys: Say) -> None:
    document = modelarts(prefill=[server(A, 4)], decode=[server(A, 4)])

    line = _linted(save, capsys, document)

    assert line.endswith("A device_id can be used only once in prefill server and decode server. [device-twice]")
    ported = modelarts([server(A, 4, server_port="8088")], [server(A, 4, server_port="8089")])
    assert cli.main(["lint", save("t.json", ported), "--share-devices"]) == 0


@pytest.mark.covers("A11.21", "A7.91")
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (([2, 1], [2]), "All the tensor-parallel-size of the prefill server must be same."),
        (([2], [2, 1]), "All the tensor-parallel-size of the decode server must be same."),
        (([2], [1]), "The tensor-parallel-size of prefill server and decode server must be same."),
    ],
)
def test_unequal_sizes_are_a_note_and_with_strict_an_error(
    save: Save, capsys: Say, sizes: tuple[list[int], list[int]], words: str
) -> None:
    starts = [0, *(sum((*sizes[0], *sizes[1])[: number + 1]) for number in range(len(sizes[0]) + len(sizes[1])))]
    servers = [server(A, *range(first, last)) for first, last in pairwise(starts)]
    document = modelarts(servers[: len(sizes[0])], servers[len(sizes[0]) :])

    assert cli.main(["lint", save("t.json", document)]) == 0
    assert words in capsys.readouterr().out
    assert words in _linted(save, capsys, document, "--strict")


@pytest.mark.covers("A7.92")
@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_a_table_without_three_groups_does_not_start(save: Save, count: int) -> None:
    groups = [*modelarts()["server_group_list"], group(3, server(C, 0))][:count]

    message = _started(save, grouped(*groups), local())

    assert message.startswith("GLOBAL_RANK_TABLE_FILE_PATH: ")
    assert f"server_group_list has {count} group{'' if count == 1 else 's'}; must have 3: " in message


@pytest.mark.covers("A7.93")
def test_two_schedulers_and_a_scheduler_with_a_device_do_not_start(save: Save) -> None:
    rest = modelarts()["server_group_list"][1:]

    two = _started(save, grouped(group(0, server(A), server(B)), *rest), local())
    armed = _started(save, grouped(group(0, server(A, 1)), *rest), local())

    assert "server_group_list[0] has 2 schedulers; must have 1" in two
    assert 'server_group_list[0].server_list[0].device is ["1"]; must be absent: the scheduler has no device' in armed


@pytest.mark.covers("A7.94")
def test_swapped_groups_wrong_counts_and_numbers_are_errors(save: Save, capsys: Say) -> None:
    swapped = grouped(group(0, server(A)), group(2, server(A, 4)), group(1, server(B, 6)))
    counted, typed = modelarts(), modelarts()
    counted["server_group_list"][1]["server_count"] = "2"
    typed["server_group_list"][1]["server_list"][0]["device"][0]["rank_id"] = 0

    assert _linted(save, capsys, swapped).endswith("[group-id]")
    assert 'server_count is "2"; must be "1"' in _linted(save, capsys, counted)
    assert "device[0].rank_id is 0; must be a string" in _linted(save, capsys, typed)


@pytest.mark.covers("A7.95")
@pytest.mark.parametrize("ranks", [("0", "2"), ("1", "2"), ("0", "0")])
def test_ranks_with_a_gap_or_from_1_are_errors(save: Save, capsys: Say, ranks: tuple[str, str]) -> None:
    document = modelarts()
    for entry, rank in zip(document["server_group_list"][2]["server_list"][0]["device"], ranks, strict=True):
        entry["rank_id"] = rank

    assert 'must be ["0", "1"]: from 0, without a gap, each once [rank-id]' in _linted(save, capsys, document)


@pytest.mark.covers("A7.95")
def test_devices_keep_their_physical_ids_in_any_rank_order(save: Save) -> None:
    entry = server(B, 7, 6)
    entry["device"][0]["rank_id"], entry["device"][1]["rank_id"] = "1", "0"

    assert _started(save, modelarts(decode=[entry]), local(entry)) == "decode"


@pytest.mark.covers("A7.96")
@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("device_ip", "198.51.100.99", "server_list[0].device[0].device_ip"),
        ("rank_id", "1", "server_list[0].device[0].rank_id"),
        ("device_id", "1", "the device_id list"),
    ],
)
def test_a_local_table_is_an_exact_copy_of_its_global_entry(
    save: Save, capsys: Say, key: str, value: str, place: str
) -> None:
    own = local(server(B, 6))
    own["server_list"][0]["device"][0][key] = value
    if key == "rank_id":
        own = local(server(B, 6, 7))
        own["server_list"][0]["device"][0]["rank_id"], own["server_list"][0]["device"][1]["rank_id"] = "1", "0"
    document = modelarts(decode=[server(B, 6, 7) if key == "rank_id" else server(B, 6)])

    message = _started(save, document, own)
    assert cli.main(["lint", save("g.json", document), save("l.json", own)]) == 2

    assert "is not in the global table; the nearest entry is decode-0 (server_group_list[2].ser" in message
    assert place in message
    assert "[not-in-global]" in capsys.readouterr().out


@pytest.mark.covers("A7.96")
def test_two_local_tables_never_match_one_entry(save: Save, capsys: Say) -> None:
    paths = [save("g.json", modelarts()), save("l.json", local()), save("twin.json", local())]

    assert cli.main(["lint", *paths]) == 2
    assert "is decode-0 of " in capsys.readouterr().out


@pytest.mark.covers("A7.97")
def test_the_role_is_that_of_the_matching_entry(save: Save) -> None:
    roles = [_started(save, modelarts(), own) for own in (local(server(A)), local(server(A, 4, 5)), local())]

    assert roles == ["scheduler", "prefill", "decode"]


@pytest.mark.covers("A7.98")
def test_a_table_that_differs_from_the_merged_one_is_reported(tmp_path: Path, save: Save, capsys: Say) -> None:
    assert _merged(tmp_path, SCHEDULER_PART, DECODE_PART) == 0
    path = str(tmp_path / "out" / "global_ranktable_merge.json")
    same = save("same.json", json.loads(Path(path).read_text()))
    other = save("other.json", modelarts(decode=[server(B, 5, 6)]))
    capsys.readouterr()

    assert cli.main(["lint", path, same]) == 0
    assert cli.main(["lint", path, other]) == 2
    assert f"{other}: differs from {path}: digest " in capsys.readouterr().out
