"""The tokens of top_p on a device: by FlashInfer's stand-in and by a sort, compared with the CPU's sampler."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engine.cuda.nucleus
from devices import table
from engine.cuda.nucleus import find_nucleus, flashinfer_nucleus
from engine.loader import load_model
from engine.ranks import rank_part
from engine.ranks.budget import with_budget
from engine.ranks.reduce import Reduce
from engine.ranks.setup import RankSetup
from engine.sampling.sampler import Nucleus, draw, torch_nucleus
from engine.step import BatchSequence, SampleRow, StepBatch
from tests.devices.every_device import open_device
from tests.devices.fake_device import TRAITS, FakeDevice, FakeKind
from tests.engine import flashinfer_ops_stand_in
from tests.engine.tiny_models import VOCAB_SIZE, make_tiny_model
from wire.kv_layout import PoolLayout
from wire.types import SamplingParams

_PARAMS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9}, {"top_p": 0.95, "temperature": 0.7}, {"top_p": 0.5, "temperature": 2.0},
    {"top_k": 40, "top_p": 0.9}, {"top_k": 50}, {"top_p": 0.99, "min_p": 0.01}, {"temperature": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
)  # fmt: skip


def by_flashinfer(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    return draw(scores, rows, flashinfer_nucleus(flashinfer_ops_stand_in.top_p_renorm_probs))


def by_sorting(scores: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    return draw(scores.to(open_device("card").torch_device), rows).cpu()


@pytest.mark.often("50-4000-by_sorting", "50-4000-by_flashinfer", "50000-64-by_sorting")
@pytest.mark.parametrize("way", [by_flashinfer, by_sorting])
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(50, 4000), (2000, 2000), (50_000, 64)])
def test_seeded_rows_draw_the_cpus_tokens(
    way: Callable[[torch.Tensor, list[SampleRow]], torch.Tensor], vocab_size: int, num_rows: int
) -> None:
    """All of them: float32 sums of two candidates that tie could differ, and none does."""
    scores = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    rows = [
        SampleRow(i, SamplingParams(max_tokens=9, seed=i, **_PARAMS[i % len(_PARAMS)]), i % 3, i % 7)
        for i in range(num_rows)
    ]

    with torch.inference_mode():
        got, expected = way(scores, rows), draw(scores, rows)

    assert int((got != expected).sum()) == 0
    assert len(set(expected.tolist())) > 20


def _failing(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available")


def _best_only(probs: torch.Tensor, top_p: torch.Tensor, *, is_deterministic: bool) -> torch.Tensor:
    return probs.masked_fill(probs < probs.amax(dim=-1, keepdim=True), 0.0)


def find_with(op: Callable[..., Any], vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> Nucleus | None:
    module = SimpleNamespace(top_p_renorm_probs=op)
    monkeypatch.setattr(engine.cuda.nucleus, "find_flashinfer", lambda: (module, "flashinfer 9"))
    return find_nucleus(FakeDevice(), vocab_size)


@pytest.mark.parametrize(
    ("op", "why"),
    [(_failing, "RuntimeError: no kernel image is available"), (_best_only, "for top_p 0.9, tokens with 0.8")],
)
def test_a_nucleus_that_fails_or_differs_is_not_used(
    op: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_with(op, 3000, monkeypatch) is None

    (warning,) = [line.getMessage() for line in caplog.records]
    assert warning.startswith('sampling_fallback op=top_p_renorm_probs library="flashinfer 9" backend=torch error="')
    assert why in warning


@pytest.mark.parametrize("vocab_size", [100, 30_000])
def test_flashinfers_nucleus_is_used_where_it_agrees(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_with(flashinfer_ops_stand_in.top_p_renorm_probs, vocab_size, monkeypatch) is not None
    assert not caplog.records


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_rows_without_numbers_reach_no_kernel(value: float) -> None:
    """FlashInfer's search for small vocabularies compares until two numbers are equal: on NaN it never ends."""
    scores = torch.randn(3, 40)
    scores[1] = value
    rows = [SampleRow(i, SamplingParams(max_tokens=9, seed=i, top_p=0.9), 0, 0) for i in range(3)]

    tokens = by_flashinfer(scores, rows)

    assert tokens[::2].tolist() == draw(scores, rows)[::2].tolist()
    assert 0 <= int(tokens[1]) < 40


def test_tokens_that_tie_with_the_last_one_stay() -> None:
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -9.0]])
    top_p = torch.tensor([[0.6]])

    for nucleus in (flashinfer_nucleus(flashinfer_ops_stand_in.top_p_renorm_probs), torch_nucleus):
        assert (nucleus(scores, top_p)[0] > -5).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_gpus_steps_use_flashinfers_nucleus(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    path, chosen = make_tiny_model("llama", tmp_path), []
    rows = tuple(SampleRow(i, SamplingParams(max_tokens=9, seed=i, top_p=0.9), 0, i) for i in range(8))
    batch = StepBatch(tuple(range(3, 11)), tuple(BatchSequence(0, 1, (i,)) for i in range(8)), rows)
    for attention in ("cuda", "fake"):
        traits = replace(TRAITS, attention=attention, is_asynchronous=ahead)
        monkeypatch.setattr(
            engine.cuda.nucleus, "find_flashinfer", lambda: (flashinfer_ops_stand_in, "flashinfer 9")
        )  # fmt: skip
        model = load_model(
            path, dtype="float32", block_size=16, kv_cache_memory=2 << 20, num_threads=1,
            device=FakeDevice(traits=traits),
        ).model  # fmt: skip
        flashinfer_ops_stand_in.calls.clear()
        chosen.append(list(model.launch(batch).collect().token_ids))
        assert flashinfer_ops_stand_in.calls.count("top_p_renorm_probs") == (attention == "cuda")
        model.close()

    assert chosen[0] == chosen[1]


def test_a_rank_looks_for_its_nucleus_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check may start a process, and models are also created to measure a step's memory."""
    monkeypatch.setitem(table.KINDS, "fake", FakeKind(replace(TRAITS, attention="cuda")))
    looks: list[int] = []
    monkeypatch.setattr(rank_part, "find_nucleus", lambda device, vocab_size: looks.append(vocab_size))
    setup = RankSetup(
        str(make_tiny_model("llama", tmp_path)), "float32", 0, 2, 16, "auto", None, (), 1, 10.0, device="fake",
        max_model_len=64, largest_step=(24, 4),
    )  # fmt: skip

    part = with_budget(rank_part.load_part(setup, Reduce()))
    layout = PoolLayout(part.loaded.tensors, num_blocks=2, block_size=16)
    part.make_model(rank_part.part_info(part, layout), part.device.make_pool(layout)).close()

    assert looks == [VOCAB_SIZE]
