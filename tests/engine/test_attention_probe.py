"""An attention backend that is wrong or fails here: found by a small step, named in one warning, and replaced."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention import backends
from engine.attention.backend_choice import why_not
from engine.attention.interface import AttentionBackend, AttentionOptions, StepAttention
from engine.attention.probe import LayerKind, differs, usual_parts
from engine.attention.reference import ReferenceAttention
from engine.attention.torch_cpu import TorchCpuAttention
from engine.loader import LoadedModel, load_model
from engine.oracle import Oracle
from engine.step_metadata import StepMetadata
from tests.devices.fake_device import FakeDevice
from tests.engine.step_runner import generate
from tests.engine.tiny_models import make_tiny_model

KINDS = {
    "heads": LayerKind(4, 4, 64, 64, 0.125),
    "groups": LayerKind(9, 3, 32, 32, 0.2),
    "dims": LayerKind(4, 1, 24, 40, 0.2),
    "window": LayerKind(4, 2, 16, 16, 0.25, sliding_window=7),
    "softcap": LayerKind(4, 2, 16, 16, 0.25, softcap=2.0),
    "sinks": LayerKind(4, 2, 16, 16, 0.25, sliding_window=20, has_sinks=True),
}
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions], torch.Tensor]
Change = Callable[[Attend, torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions], torch.Tensor]


class Broken:
    """The reference, broken in one way. Implements AttentionBackend and StepAttention."""

    def __init__(self, change: Change, *, keeps_first: bool = True, swaps: bool = False) -> None:
        self._change, self._keeps_first, self._swaps = change, keeps_first, swaps
        self._step: StepAttention

    def plan(self, metadata: StepMetadata) -> "Broken":
        self._step = ReferenceAttention().plan(metadata)
        return self

    def write(self, keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> None:
        before = keys[0].clone()
        self._step.write(keys, values, *((new_values, new_keys) if self._swaps else (new_keys, new_values)))
        if not self._keeps_first:
            keys[0] = before.nan_to_num(1.0)  # a slot that is nobody's

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return self._change(self._step.attend, query, keys, values, options)


def as_it_is(attend: Attend, *given: torch.Tensor | AttentionOptions) -> torch.Tensor:
    return attend(*given)  # type: ignore[arg-type]


def larger(attend: Attend, *given: torch.Tensor | AttentionOptions) -> torch.Tensor:
    return as_it_is(attend, *given) * 1.05


def rolled_heads(attend: Attend, *given: torch.Tensor | AttentionOptions) -> torch.Tensor:
    return as_it_is(attend, *given).roll(1, dims=1)


def without_a_row(attend: Attend, *given: torch.Tensor | AttentionOptions) -> torch.Tensor:
    return as_it_is(attend, *given)[:-1]


def without(name: str) -> Change:
    def attend_without(
        attend: Attend, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        left: AttentionOptions = replace(options, **{name: None})  # type: ignore[arg-type]
        return attend(query, keys, values, left)

    return attend_without


def failing(attend: Attend, *given: torch.Tensor | AttentionOptions) -> torch.Tensor:
    raise RuntimeError("aclnnFusedInferAttentionScore failed, error code is 561002\n[ERROR] see the log")


def check_backend(
    backend: AttentionBackend, kind: LayerKind, *, block_size: int = 16, dtype: torch.dtype
) -> str | None:
    parts = usual_parts(block_size)
    return differs(backend, kind, parts, block_size=block_size, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.combinations(2)
@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_that_is_right_does_not_differ(kind: str, dtype: torch.dtype, block_size: int) -> None:
    assert check_backend(TorchCpuAttention(), KINDS[kind], block_size=block_size, dtype=dtype) is None


@pytest.mark.parametrize(
    ("backend", "kind", "message"),
    [
        (Broken(larger), "heads", "largest difference "),
        (Broken(rolled_heads), "groups", "query heads 9, KV heads 3, head dim 32: largest difference "),
        (Broken(without("sliding_window")), "window", "window 7: largest difference "),
        (Broken(without("softcap")), "softcap", "softcap 2: largest difference "),
        (Broken(without("sinks")), "sinks", "window 20, sinks: largest difference "),
        (Broken(without_a_row), "dims", "value dim 40: the output has shape [144, 4, 40], not [145, 4, 40]"),
        (Broken(as_it_is, swaps=True), "heads", "the keys in the pool are not those passed to write"),
        (Broken(as_it_is, keeps_first=False), "heads", "or are in other slots"),
    ],
)
def test_wrong_attention_is_detected_and_described(backend: Broken, kind: str, message: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = check_backend(backend, KINDS[kind], block_size=128, dtype=dtype)

        assert found is not None
        assert message in found, found


def test_a_window_longer_than_the_checked_step_is_checked_too() -> None:
    kind = replace(KINDS["window"], sliding_window=4096)

    found = why_not(Broken(without("sliding_window")), [kind], FakeDevice(), 16, torch.float32)

    assert found is not None
    assert "window 100: largest difference" in found


def load(
    path: Path, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch, backend_name: str = "auto"
) -> LoadedModel:
    monkeypatch.setitem(backends.MAKERS, "fake", lambda device, threads: backend)
    return load_model(
        path, dtype="float32", block_size=32, kv_cache_memory=2 << 20, num_threads=1, attention_backend=backend_name,
        device=FakeDevice(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "error"),
    [(Broken(larger), "largest difference"), (Broken(failing), "RuntimeError: aclnnFusedInferAttentionScore")],
)
def test_broken_attention_falls_back_with_one_warning(
    backend: Broken, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, prompts = make_tiny_model("mistral-sliding", tmp_path / "model"), [[5, 6, 7], [9] * 40]

    with caplog.at_level(logging.WARNING, "pdserve"):
        loaded = load(path, backend, monkeypatch)
    got = generate(loaded.model, prompts, 12, chunk=16)
    loaded.model.close()

    assert got == Oracle(path, "float32").generate_greedy(prompts, 12, ignore_eos=True)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("attention_fallback failed=Broken used=ReferenceAttention device=fake:0 ")
    assert error in warning
    (note,) = [note for note in loaded.notes if note.startswith("attention by the reference, because 'fake'")]
    assert error in note
    assert "\n" not in note


def test_correct_attention_is_kept_without_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, backend, seen = make_tiny_model("llama", tmp_path / "model"), TorchCpuAttention(), list[StepMetadata]()
    plan = backend.plan

    def seen_plan(metadata: StepMetadata) -> StepAttention:
        seen.append(metadata)
        return plan(metadata)

    monkeypatch.setattr(backend, "plan", seen_plan)

    loaded = load(path, backend, monkeypatch)
    at_load = len(seen)
    generate(loaded.model, [[5, 6, 7]], 2, chunk=16)
    loaded.model.close()

    assert at_load == 1  # one kind of layer
    assert len(seen) > at_load
    assert not [note for note in loaded.notes if "reference" in note]
    assert not caplog.records


def test_the_named_reference_is_used_without_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_tiny_model("llama", tmp_path / "model")

    loaded = load(path, Broken(failing), monkeypatch, backend_name="reference")
    got = generate(loaded.model, [[5, 6, 7]], 4, chunk=16)
    loaded.model.close()

    assert got == Oracle(path, "float32").generate_greedy([[5, 6, 7]], 4, ignore_eos=True)
    assert not caplog.records
