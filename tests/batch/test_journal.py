"""A journal keeps every answer however it is cut short, for exactly its own run, and for one run at a time."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.journal import Journal
from batch.journal_record import JournalRecord, encode, encode_header
from batch.output_line import LineOutcome
from wire.errors import ConfigError

ANSWER_SETTINGS = {"input": "sha256 00", "model": "m"}
NUM_REQUESTS = 8
RECORDS = [
    JournalRecord(
        position, LineOutcome(b'{"n":%d,"text":"%b"}' % (position, "é\u2028".encode() * position), n % 3 == 0, n, 2 * n)
    )
    for n, position in enumerate((3, 0, 5, 1, 2))
]


HEADER = encode_header(ANSWER_SETTINGS)
CONTENT = HEADER + b"".join(map(encode, RECORDS))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where journals of many examples lie, one after the other."""
    return tmp_path_factory.mktemp("examples") / "journal"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal lies."""
    return tmp_path / "out.jsonl.journal"


def _open(path: Path, answer_settings: dict[str, str] = ANSWER_SETTINGS) -> Journal:
    return Journal.open(path, answer_settings, NUM_REQUESTS)


def _written(path: Path) -> bytes:
    """Return the bytes of a journal that has RECORDS."""
    journal = _open(path)
    for record in RECORDS:
        journal.append(record)
    journal.sync()
    journal.close()
    return path.read_bytes()


def _lines(journal: Journal) -> dict[int, tuple[bytes, bool]]:
    return {position: journal.line(position) for position in range(NUM_REQUESTS) if journal.has(position)}


def _expected(records: list[JournalRecord]) -> dict[int, tuple[bytes, bool]]:
    return {record.position: (record.outcome.line, record.outcome.failed) for record in records}


def test_a_journal_is_its_header_and_records(path: Path) -> None:
    assert _written(path) == CONTENT


def test_appended_answers_are_read_by_position_also_after_reopening(path: Path) -> None:
    journal = _open(path)
    for record in RECORDS:
        journal.append(record)
    assert _lines(journal) == _expected(RECORDS)
    journal.close()

    again = _open(path)
    assert _lines(again) == _expected(RECORDS)
    assert (again.num_done, again.num_failed, again.prompt_tokens, again.completion_tokens) == (5, 2, 10, 20)
    again.close()


def test_a_resumed_journal_is_appended_to(path: Path) -> None:
    _written(path)
    journal = _open(path)
    journal.append(JournalRecord(7, LineOutcome(b"{}", False)))
    journal.close()

    again = _open(path)
    assert _lines(again) == _expected([*RECORDS, JournalRecord(7, LineOutcome(b"{}", False))])
    again.close()


@given(st.data())
def test_a_journal_cut_at_any_byte_keeps_the_records_before_it(
    place: Path, data: st.DataObject
) -> None:  # fmt: skip
    at = data.draw(st.integers(0, len(CONTENT)))
    partial = data.draw(st.sampled_from([b"", b"\xff", b"torn", b"\x00" * 9])) if at >= len(HEADER) else b""
    place.write_bytes(CONTENT[:at] + partial)

    ends = [len(HEADER) + sum(len(encode(r)) for r in RECORDS[: n + 1]) for n in range(len(RECORDS))]
    kept = [record for record, end in zip(RECORDS, ends, strict=True) if end <= at]
    journal = _open(place)
    assert _lines(journal) == _expected(kept)
    journal.append(RECORDS[-1] if RECORDS[-1] not in kept else JournalRecord(7, LineOutcome(b"{}", True)))
    journal.close()
    again = _open(place)
    assert again.num_done == len(kept) + 1
    again.close()


@given(st.data())
def test_a_journal_with_a_corrupt_byte_loses_only_that_record(
    place: Path, data: st.DataObject
) -> None:  # fmt: skip
    content = bytearray(CONTENT)
    content[data.draw(st.integers(len(HEADER), len(content) - 1))] ^= data.draw(st.integers(1, 255))
    place.write_bytes(content)

    journal = _open(place)
    found = _lines(journal)
    journal.close()
    assert found.items() <= _expected(RECORDS).items()
    assert len(found) >= len(RECORDS) - 2  # a corrupt line end also loses the next line


def test_repeated_or_unknown_positions_are_counted_once_or_never(path: Path) -> None:
    content = _written(path)
    path.write_bytes(
        content
        + encode(JournalRecord(3, LineOutcome(b"other", True)))
        + encode(JournalRecord(NUM_REQUESTS, RECORDS[0].outcome))
    )

    journal = _open(path)
    assert _lines(journal) == _expected(RECORDS)
    assert journal.num_done == len(RECORDS)
    journal.close()


def test_a_good_answer_replaces_an_earlier_failure(path: Path) -> None:
    content = _written(path)
    mended = JournalRecord(3, LineOutcome(b"mended", False, 7, 9))
    path.write_bytes(content + encode(mended) + encode(JournalRecord(3, LineOutcome(b"late", True))))

    journal = _open(path)
    assert _lines(journal) == _expected([*RECORDS[1:], mended])
    assert (journal.num_done, journal.num_failed) == (5, 1)
    journal.close()


def test_failed_answers_are_dropped_only_for_a_retry(path: Path) -> None:
    _written(path)
    journal = _open(path)

    journal.forget_failed()

    good = [record for record in RECORDS if not record.outcome.failed]
    assert _lines(journal) == _expected(good)
    assert (journal.num_done, journal.num_failed, journal.is_empty) == (3, 0, False)
    again = JournalRecord(RECORDS[0].position, LineOutcome(b"again", True))
    journal.append(again)
    assert _lines(journal) == _expected([*good, again])
    assert (journal.num_done, journal.num_failed) == (4, 1)
    journal.close()
    other = _open(path)
    assert _lines(other) == _expected(RECORDS)
    other.close()


# The run that it belongs to


@pytest.mark.parametrize(
    ("answer_settings", "words"),
    [
        (ANSWER_SETTINGS | {"model": "other"}, "model was m and is other now; "),
        (ANSWER_SETTINGS | {"input": "sha256 11"}, "input was sha256 00 and is sha256 11 now; "),
        (ANSWER_SETTINGS | {"dtype": "float32"}, r"dtype was \(none\) and is float32 now; "),
        ({"input": "sha256 00"}, r"model was m and is \(none\) now; "),
    ],
)
def test_a_journal_of_another_run_is_refused_and_unchanged(
    path: Path, answer_settings: dict[str, str], words: str
) -> None:  # fmt: skip
    content = _written(path)

    with pytest.raises(ConfigError, match=f"has the answers of another run: {words}"):
        _open(path, answer_settings)
    assert path.read_bytes() == content


def test_answers_of_a_longer_input_are_refused_and_left_as_they_are(path: Path) -> None:
    journal = Journal.open(path, {"input": "A"}, 600)
    journal.append(JournalRecord(13, RECORDS[0].outcome))
    journal.close()
    content = path.read_bytes()

    with pytest.raises(ConfigError, match="has the answers of another run: input was A and is B now; "):
        Journal.open(path, {"input": "B"}, 2)
    assert path.read_bytes() == content


def test_an_empty_journal_of_another_run_is_replaced(path: Path) -> None:
    _open(path, {"model": "other"}).close()
    journal = _open(path)
    journal.append(RECORDS[0])
    journal.close()

    again = _open(path)
    assert _lines(again) == _expected(RECORDS[:1])
    again.close()


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b"{}\n{}\n", b"\x00" * 100, b"00000000 {}\n"])
def test_a_file_that_is_not_a_journal_is_refused_and_unchanged(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="is not a pdserve journal, or is damaged"):
        _open(path)
    assert path.read_bytes() == content


def test_a_second_run_is_refused_while_the_first_has_the_journal(path: Path) -> None:
    first = _open(path)
    with pytest.raises(ConfigError, match="belongs to another run, which is writing the same output"):
        _open(path)
    first.close()

    _open(path).close()


def test_a_finished_run_leaves_the_next_runs_journal_alone(path: Path) -> None:
    first = _open(path)
    first.remove()
    second = _open(path)
    first.remove()
    first.close()

    assert path.exists()
    second.remove()
    second.close()
    assert not path.exists()


def test_a_link_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")

    for name in ("link", "dangling", ".", "pipe"):
        with pytest.raises(ConfigError):
            _open(tmp_path / name)
    assert (tmp_path / "real").read_bytes() == b""
    assert not (tmp_path / "nowhere").exists()


def test_a_journal_is_readable_only_by_its_owner(path: Path) -> None:
    _written(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# A full disk


def test_an_append_that_fails_leaves_the_journal_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = _written(path)
    journal = _open(path)
    real, writes = os.pwrite, []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        writes.append(len(data))
        if len(writes) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:7], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        journal.append(JournalRecord(7, LineOutcome(b"{}", False)))
    monkeypatch.undo()

    assert path.read_bytes() == content
    assert not journal.has(7)
    journal.append(JournalRecord(7, LineOutcome(b"{}", False)))
    journal.close()
    again = _open(path)
    assert again.num_done == len(RECORDS) + 1
    again.close()


def test_a_journal_that_cannot_be_started_is_refused_and_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        _open(path)
    assert not path.exists()


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        _open(tmp_path / "nowhere" / "journal")


def test_a_changed_record_is_detected(path: Path) -> None:
    content = _written(path)
    journal = _open(path)
    path.write_bytes(content[:-5] + b"xxxx\n")

    with pytest.raises(OSError, match="is not the one that was written"):
        journal.line(RECORDS[-1].position)
    journal.close()
