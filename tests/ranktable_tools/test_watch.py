"""`ranktable watch`: one sentence for each change."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ranktable_tools.any_file import read_table
from ranktable_tools.cli import main
from ranktable_tools.digest import table_digest
from ranktable_tools.table_file import read_global
from ranktable_tools.watch import Seen, Watch, seen
from ranktable_tools.watched_table import WatchedTable
from tests.ranktable_tools.documents import A, B, C, Document, group, kubeinfer, modelarts, server

Save = Callable[[str, object], str]


def read(path: str) -> Seen:
    """Read a table of any dialect."""
    opened = read_table(path)
    return seen(opened.reading.table, is_ours=opened.dialect.name == "modelarts")


def printed(save: Save, *documents: object) -> list[str]:
    """Return what a watch prints for one file that has these contents one after the other."""
    lines: list[str] = []
    path = save("t.json", documents[0])
    watch = Watch(WatchedTable(path, read), lines.append)
    for document in documents:
        save("t.json", document)
        for _ in range(3):
            watch.poll()
    return lines


def test_each_change_is_a_sentence_after_version_and_digest(save: Save) -> None:
    more = modelarts(decode=[server(B, 6, 7), server(C, 0, 1)])
    less = modelarts(decode=[server(C, 0, 1)])

    lines = printed(save, modelarts(), more, less)

    digests = [_digest(save, document) for document in (modelarts(), more, less)]
    assert lines == [
        f"version 1, digest {digests[0]}: 1 prefill, 1 decode",
        f"version 2, digest {digests[1]}: decode-1 (192.0.2.3, devices 0,1) is new.",
        f"version 3, digest {digests[2]}: decode-0 (192.0.2.2, devices 6,7) is gone.",
    ]


def test_broken_tables_are_reported_and_the_last_good_one_stays(save: Save) -> None:
    more = modelarts(decode=[server(B, 6, 7), server(C, 0, 1)])

    lines = printed(save, modelarts(), json.dumps(more)[:200], {**more, "status": "initializing"}, more)

    assert len(lines) == 4
    assert lines[1].startswith("ignored: ")
    assert "not JSON" in lines[1]
    assert lines[1].endswith("; the previous table stays in use")
    assert lines[2].startswith("waiting: ")
    assert '"initializing"' in lines[2]
    assert lines[3].endswith("decode-1 (192.0.2.3, devices 0,1) is new.")


def test_a_table_restored_unchanged_is_reported_once(save: Save) -> None:
    more = modelarts(decode=[server(B, 6, 7), server(C, 0, 1)])

    lines = printed(
        save, modelarts(), "{", modelarts(), modelarts(), "{", more, {**modelarts(), "status": "initializing"}
    )

    digest = _digest(save, modelarts())
    assert lines[2] == f"valid again: the table of version 1, digest {digest}"
    assert [line.split()[0] for line in lines] == ["version", "ignored:", "valid", "ignored:", "version", "waiting:"]


def test_a_table_of_the_same_cluster_is_not_a_new_version(save: Save) -> None:
    other = {**modelarts(), "hardware_type": "800I-A2-32G"}

    assert len(printed(save, modelarts(), other)) == 1


def test_a_table_of_another_dialect_has_no_digest(save: Save) -> None:
    larger: Document = kubeinfer()
    larger["server_group_list"].append(group(4, server(B, 4, 5)))

    lines = printed(save, kubeinfer(), larger)

    assert lines[0] == "version 1: 3 instances, roles unknown"
    assert lines[1].startswith("version 2: ")
    assert lines[1].endswith("(192.0.2.2, devices 4,5) is new.")


def test_watch_prints_the_table_and_ends_in_time(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    path = save("t.json", modelarts(prefill=[server(A, 0), server(A, 1)]))

    assert main(["watch", path, "--interval", "0.01", "--for", "0.01"]) == 0
    assert f"version 1, digest {_digest_of(path)}: 2 prefill, 1 decode" in capsys.readouterr().out


def test_the_command_waits_for_a_complete_table(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    path = save("t.json", {**modelarts(), "status": "initializing"})

    assert main(["watch", path, "--interval", "0.01", "--for", "0.01"]) == 0
    assert "waiting: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--interval", "0"), "--interval is 0"),
        (("--interval", "7200"), "at most 3600"),
        (("--for", "-1"), "--for is -1"),
        (("--num-prefill", "0"), "--num-prefill is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(
    save: Save, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    assert main(["watch", save("t.json", modelarts()), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "gone.json")]) == 2
    assert "gone.json: cannot be read" in capsys.readouterr().err


def _digest(save: Save, document: object) -> str:
    return _digest_of(save("digest.json", document))


def _digest_of(path: str) -> str:
    return table_digest(read_global(path))
