"""A journal's lines are self-checking: what was written is read, and an incomplete record is not read."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from batch.journal_record import JournalRecord, decode, decode_header, encode, encode_header, is_cut_header
from batch.output_line import LineOutcome

RECORDS = st.builds(
    JournalRecord,
    st.integers(0, 2**32),
    st.builds(
        LineOutcome,
        st.text().map(lambda text: text.replace("\n", " ").encode()),
        st.booleans(),
        st.integers(0, 2**40),
        st.integers(0, 2**40),
    ),
)


@given(RECORDS)
def test_a_record_is_read_as_it_was_written(record: JournalRecord) -> None:
    written = encode(record)

    assert decode(written) == record
    assert written.count(b"\n") == 1


@given(RECORDS, st.data())
def test_a_truncated_record_is_invalid(record: JournalRecord, data: st.DataObject) -> None:
    written = encode(record)
    at = data.draw(st.integers(0, len(written) - 1))

    assert decode(written[:at]) is None
    assert decode(written[:at] + b"\n") is None or at == len(written) - 1


@given(RECORDS, st.data())
def test_a_record_with_a_changed_byte_is_invalid(record: JournalRecord, data: st.DataObject) -> None:
    written = bytearray(encode(record))
    written[data.draw(st.integers(0, len(written) - 1))] ^= data.draw(st.integers(1, 255))

    assert decode(bytes(written)) is None


@given(st.binary())
def test_anything_else_is_not_a_record(content: bytes) -> None:
    assert decode(content + b"\n") is None
    assert decode_header(content + b"\n") is None
    assert decode(b"%08x %b\n" % (zlib.crc32(content), content)) is None or content.count(b" ") >= 4


def test_a_header_round_trips_and_is_not_a_record() -> None:
    header = encode_header({"input": "sha256 00", "model": "m\né"})

    assert decode_header(header) == {"input": "sha256 00", "model": "m\né"}
    assert decode(header) is None
    assert decode_header(encode(JournalRecord(0, LineOutcome(b"{}", False)))) is None


def test_only_prefixes_of_a_header_are_recognised_as_one() -> None:
    header = encode_header({"model": "m"})

    assert all(is_cut_header(header[:at]) for at in range(len(header)))
    assert not is_cut_header(header)
    for other in (b"my own notes", b"{}", b"0123456789", b"00000000 {}", b"0123abcx", b"\x00" * 20, b"\n"):
        assert not is_cut_header(other)
