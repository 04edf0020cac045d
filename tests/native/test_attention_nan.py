"""NaN stays NaN: a row whose query, keys or values have it is NaN where textbook softmax says so."""

from dataclasses import dataclass

import pytest
import torch

from engine.attention.interface import AttentionOptions
from engine.attention.native import NativeAttention
from tests.engine.attention_case import Case, Sequence, Shape, make_case

_NAN, _INF = float("nan"), float("inf")
_PAYLOADS = (0x7F800001, 0x7F812345, 0x7FC00ABC, 0xFFC001FF - (1 << 32))
_PLAIN, _CAPPED = AttentionOptions(0.2), AttentionOptions(0.2, softcap=30.0)


@dataclass(frozen=True, slots=True)
class Edit:
    """The value written over one position of every head, or over all positions where none is given."""

    field: str
    value: float | torch.Tensor
    position: int | None = None

    def apply(self, sequence: Sequence) -> None:
        tensor = getattr(sequence, self.field)
        at = slice(None) if self.position is None else slice(self.position, self.position + 1)
        tensor[:, at] = self.value


def key(position: int, value: float) -> list[Edit]:
    return [Edit("keys", value, position)]


def query(position: int, value: float) -> list[Edit]:
    return [Edit("query", value, position)]


def payload(bits: int) -> list[Edit]:
    """Keys of position 4 are NaN with an unusual payload."""
    return [Edit("keys", torch.tensor(bits, dtype=torch.int32).view(torch.float32), 4)]


_CASES: dict[str, tuple[int, int, AttentionOptions, list[Edit]]] = {
    "key, within a tile": (40, 1, _PLAIN, key(10, _NAN)),
    "key, alone in its partition": (128, 1, _PLAIN, key(128, _NAN)),
    "key, first of a partition": (299, 1, _PLAIN, key(256, _NAN)),
    "key, alone in its tile": (64, 1, _PLAIN, key(64, _NAN)),
    "key, first of a chunk": (128, 9, _PLAIN, key(128, _NAN)),
    "key, window": (299, 1, AttentionOptions(0.2, sliding_window=44), key(256, _NAN)),
    "key, window and sink": (299, 1, AttentionOptions(0.2, sliding_window=44, sinks=torch.ones(4)), key(256, _NAN)),
    "key, alone in its partition, sink": (128, 1, AttentionOptions(0.2, sinks=torch.ones(4)), key(128, _NAN)),
    "key, capped": (10, 1, _CAPPED, key(3, _NAN)),
    "query": (300, 2, _PLAIN, query(300, _NAN)),
    "query, capped": (10, 1, _CAPPED, query(10, _NAN)),
    "value": (200, 1, _PLAIN, [Edit("values", _NAN, 130)]),
    "infinite key, capped": (10, 1, _CAPPED, key(3, _INF)),
    "no weight at all": (200, 1, _PLAIN, [Edit("keys", -_INF), Edit("query", 1.0)]),
    **{f"payload {bits & 0xFFFFFFFF:#x}": (10, 1, _PLAIN, payload(bits)) for bits in _PAYLOADS},
    **{f"payload {bits & 0xFFFFFFFF:#x}, capped": (10, 1, _CAPPED, payload(bits)) for bits in _PAYLOADS},
}


@pytest.mark.parametrize("name", _CASES)
def test_rows_are_nan_exactly_where_softmax_is(backend: NativeAttention, name: str) -> None:
    start, count, options, edits = _CASES[name]
    case = make_case([(start, count), (40, 3)], Shape(4, 2, 16, 16))
    for edit in edits:
        edit.apply(case.sequences[0])

    got = case.run(backend, options)

    torch.testing.assert_close(got, case.expected(options), rtol=1e-4, atol=1e-5, equal_nan=True)
    assert _neighbours(case, got).isfinite().all()


def _neighbours(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of the second sequence."""
    return rows[case.metadata.packed.query_ends[0] :]
