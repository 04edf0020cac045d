"""Several ranks on devices, each a process with its own pool and links: the tokens are those of transformers."""

from pathlib import Path

import pytest

from devices import table
from engine.oracle import generate_greedy
from instance import ranks
from tests.devices.fake_device import CardKind
from tests.engine.tiny_models import make_tiny_model
from tests.instance.device_pair import NUM_TOKENS, PROMPTS, config, serve_alone, serve_pair
from wire.types import Role

ROOT = Path(__file__).parents[2]
START_S = 100.0  # ranks are processes which import torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("ranks") / "llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    """What transformers generates after each prompt."""
    return generate_greedy(model, PROMPTS, NUM_TOKENS, dtype="float32", ignore_eos=True)


@pytest.fixture(autouse=True)
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device, here and in the processes of ranks."""
    monkeypatch.setitem(table.KINDS, "fake", CardKind())
    monkeypatch.setattr(ranks, "DEVICE_PROGRAM", "tests.devices.fake_rank")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_two_ranks_on_devices_give_the_tokens_of_transformers(model: Path, reference: list[list[int]]) -> None:
    assert serve_alone(config(model, Role.COMBINED, "fake", None, ranks=2)) == reference


@pytest.mark.parametrize(
    ("p_side", "d_side"),
    [
        (("fake", 2, 32), ("cpu", 1, 16)), (("cpu", 2, 16), ("fake", 2, 32)), (("fake", 2, 32), ("fake", 2, 16)),
        (("fake", 1, 16), ("fake", 2, 32)),
    ],
    ids=["ranks-to-cpu", "cpu-ranks-to-ranks", "ranks-to-ranks", "one-to-ranks"],
)  # fmt: skip
def test_a_prompt_crosses_from_ranks_and_to_ranks_on_devices(
    p_side: tuple[str, int, int], d_side: tuple[str, int, int], model: Path, reference: list[list[int]]
) -> None:
    (p_device, p_ranks, p_block), (d_device, d_ranks, d_block) = p_side, d_side
    prefill = config(model, Role.PREFILL, p_device, p_block, "tcp", ranks=p_ranks, port=4)
    decode = config(model, Role.DECODE, d_device, d_block, "tcp", ranks=d_ranks, port=6)

    outputs, transports = serve_pair(prefill, decode)

    assert outputs == reference
    assert transports == {"tcp"}
