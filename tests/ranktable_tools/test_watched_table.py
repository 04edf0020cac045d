"""A table file that others replace: which changes are reported, and how often."""

import json
from pathlib import Path

import pytest

from ranktable_tools.errors import RanktableError
from ranktable_tools.table_file import read_global
from ranktable_tools.tables import GlobalTable
from ranktable_tools.watched_table import WatchedTable
from tests.ranktable_tools.documents import B, C, Document, modelarts, server

OLD = modelarts()
NEW = modelarts(decode=[server(B, 6, 7), server(C, 0, 1)])


def replace(path: Path, document: object) -> None:
    """Write a file as our tools do: atomically, by a rename."""
    temporary = path.with_name("beside")
    temporary.write_text(document if isinstance(document, str) else json.dumps(document))
    temporary.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a table of one prefill and one decode instance."""
    file = tmp_path / "t.json"
    replace(file, OLD)
    return file


@pytest.fixture
def watched(path: Path) -> WatchedTable[GlobalTable]:
    """That file, read before and watched from then on."""
    return WatchedTable(str(path), read_global, read_global(str(path)))


def looks(watched: WatchedTable[GlobalTable], count: int = 4) -> list[object]:
    """Return the reports of this many reads, errors as text."""
    reported = (watched.poll() for _ in range(count))
    return [str(found) if isinstance(found, RanktableError) else found for found in reported if found is not None]


def decodes(found: list[object]) -> list[int]:
    """Return the numbers of decode instances of the reported tables; anything else fails."""
    assert all(isinstance(table, GlobalTable) for table in found), found
    return [len(table.decode) for table in found if isinstance(table, GlobalTable)]


def test_an_unchanged_file_is_not_reported(watched: WatchedTable[GlobalTable]) -> None:
    assert looks(watched) == []


def test_a_replaced_file_is_reported_once(path: Path, watched: WatchedTable[GlobalTable]) -> None:
    looks(watched)
    replace(path, NEW)

    assert decodes(looks(watched)) == [2]


def test_a_reformatted_table_is_not_reported(path: Path, watched: WatchedTable[GlobalTable]) -> None:
    replace(path, json.dumps(OLD, indent=4))

    assert looks(watched) == []


def test_a_rewrite_within_one_clock_tick_is_detected(
    path: Path, watched: WatchedTable[GlobalTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranktable_tools.watched_table._file_stamp", lambda path: (1,))
    replace(path, modelarts(decode=[server(C, 6, 7)]))
    assert decodes(looks(watched, 1)) == [1]

    replace(path, NEW)

    assert decodes(looks(watched, 1)) == [2]


def test_a_swapped_folder_behind_links_is_followed(tmp_path: Path) -> None:
    for name, document in (("..1", OLD), ("..2", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.json").write_text(json.dumps(document))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "t.json").symlink_to("..data/t.json")
    path = str(tmp_path / "t.json")
    watched = WatchedTable(path, read_global, read_global(path))
    assert looks(watched) == []

    (tmp_path / "..next").symlink_to("..2")
    (tmp_path / "..next").rename(tmp_path / "..data")

    assert decodes(looks(watched)) == [2]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (json.dumps(NEW)[:300], "not JSON"),
        ("", "not JSON"),
        ({**NEW, "version": "9"}, 'version is "9"'),
        ({**NEW, "server_group_list": NEW["server_group_list"][:2]}, "must have 3"),
    ],
    ids=["half-written", "empty", "another version", "no decode group"],
)
def test_a_broken_file_is_reported_once_and_the_last_table_stays(
    path: Path, watched: WatchedTable[GlobalTable], broken: object, words: str
) -> None:
    replace(path, broken)

    reported = looks(watched, 6)

    assert len(reported) == 1
    assert words in str(reported[0])
    assert watched.table == read_global(_write_table(path, OLD))


def test_a_missing_file_is_reported_once(path: Path, watched: WatchedTable[GlobalTable]) -> None:
    path.unlink()

    reported = looks(watched, 6)

    assert len(reported) == 1
    assert "cannot be read" in str(reported[0])
    replace(path, NEW)
    assert decodes(looks(watched)) == [2]


def test_a_slowly_written_table_is_not_an_error(path: Path, watched: WatchedTable[GlobalTable]) -> None:
    text = json.dumps(NEW)
    reported: list[object] = []
    for end in range(1, len(text), 97):
        path.write_text(text[:end])
        reported += looks(watched, 1)
    path.write_text(text)

    assert decodes(reported + looks(watched)) == [2]


def test_a_table_broken_again_is_reported_again(path: Path, watched: WatchedTable[GlobalTable]) -> None:
    reported: list[object] = []
    for document in ("{", OLD, "{"):
        replace(path, document)
        reported += [isinstance(one, str) for one in looks(watched)]

    assert reported == [True, False, True]


@pytest.mark.parametrize("trouble", ["{", {**NEW, "status": "initializing"}, None])
def test_an_unchanged_table_is_reported_once_after_a_fault(
    path: Path, watched: WatchedTable[GlobalTable], trouble: object
) -> None:
    path.unlink() if trouble is None else replace(path, trouble)
    assert len(looks(watched)) == 1

    replace(path, OLD)

    assert decodes(looks(watched, 6)) == [1]


def test_a_briefly_broken_table_is_not_reported(path: Path, watched: WatchedTable[GlobalTable]) -> None:
    replace(path, "{")
    assert looks(watched, 1) == []

    replace(path, OLD)

    assert looks(watched) == []


def test_an_initializing_table_is_reported_immediately_and_once(path: Path, watched: WatchedTable[GlobalTable]) -> None:
    for document in ({**NEW, "status": "initializing"}, {**OLD, "status": "initializing"}):
        replace(path, document)

    found = watched.poll()

    assert isinstance(found, RanktableError)
    assert found.code == "not-completed"
    assert looks(watched) == []
    replace(path, NEW)
    assert decodes(looks(watched)) == [2]


def test_a_table_that_only_adds_a_port_is_a_new_one(path: Path, watched: WatchedTable[GlobalTable]) -> None:
    document: Document = modelarts(decode=[server(B, 6, 7, server_port="8090")])
    replace(path, document)

    (found,) = looks(watched)

    assert isinstance(found, GlobalTable)
    assert found.decode[0].server_port == 8090


def test_the_first_table_is_reported(path: Path) -> None:
    assert decodes(looks(WatchedTable(str(path), read_global))) == [1]


def _write_table(path: Path, document: object) -> str:
    replace(path, document)
    return str(path)
