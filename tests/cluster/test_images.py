"""Prompts with image files over real P/D processes: the tokens of plain transformers, also when P dies meanwhile."""

import asyncio
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.layout import ClusterShape, environment, lay_out
from pdserve.ports import free_ports
from pdserve.trust import trust_of
from pdserve.verify_runs import FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S, Deployment, serving
from processes.failpoints import VARIABLE
from ranktable_tools.launch_plan import resolve
from scheduler.config import SchedulerOptions
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.process import cluster_of
from scheduler.recorded_output import RecordedOutput, record
from scheduler.request import GenerationRequest
from tests.cluster.conftest import ENGINE_FLAGS
from tests.images.image_files import file_of, image_of
from tests.instance.image_prompts import ImageModel, make_image_model
from wire.types import PromptState

pytestmark = pytest.mark.cluster

_LONG = 60
_FILES = [file_of(image_of(30, 20, seed), "JPEG") for seed in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    """Return a tiny LLaVA."""
    return make_image_model("llava", tmp_path_factory.mktemp("vision") / "llava")


def _deployment(
    model: ImageModel, folder: Path, transport: str, *, num_prefill: int = 1, num_ranks: int = 1, dies: str = "",
    decode_flags: Sequence[str] = (),
) -> Deployment:  # fmt: skip
    """Return prefill instances, of which the first has the failpoint `dies`, and a decode instance with its flags."""
    flags = (
        "--model", str(model.folder), "--device=cpu", *ENGINE_FLAGS, "--kv-transport", transport,
        "--prefill-chunk-size=13", f"--tensor-parallel-size={num_ranks}",
    )  # fmt: skip
    (port,) = free_ports(1)
    shape = ClusterShape(num_prefill, 1, "127.0.0.1", port, flags, "cpu", num_ranks)
    *instances, scheduler = lay_out(shape, folder / "tables")
    instances[0] = replace(instances[0], env={**instances[0].env, VARIABLE: dies})
    instances[-1] = replace(instances[-1], command=(*instances[-1].command, *decode_flags))
    environ = environment(scheduler, {})
    plan = resolve(environ)
    return Deployment(tuple(instances), cluster_of(plan, trust_of(plan, environ), SchedulerOptions()))


def _prompts(model: ImageModel) -> list[PromptState]:
    return [model.prompt(f"p{at}", range(30, 50), {at: data, 9: _FILES[0]}) for at, data in enumerate(_FILES)]


async def _run(control: Control, states: Sequence[PromptState]) -> list[RecordedOutput]:
    requests = [
        GenerationRequest(
            state.prompt_id, (state.token_ids,), state.params, FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S,
            images=(state.images,),
        )
        for state in states
    ]  # fmt: skip
    return await asyncio.gather(*(record(control.dispatch, request) for request in requests))


@pytest.mark.covers("B.images.6")
@pytest.mark.long
@pytest.mark.parametrize(("transport", "num_ranks"), [("shm", 1), ("tcp", 1), ("shm", 2)])
def test_image_files_cross_processes(model: ImageModel, transport: str, num_ranks: int, tmp_path: Path) -> None:
    states = _prompts(model)

    async def run() -> list[RecordedOutput]:
        async with serving(tmp_path, _deployment(model, tmp_path, transport, num_ranks=num_ranks)) as control:
            outputs = await _run(control, states)
            again = await _run(control, states)
            load = _prefill_load(control)
            assert load == (2 * 2 * len(states), len(_FILES)), "looked up, encoded"
            return [*outputs, *again]

    outputs = asyncio.run(run())

    assert [output.tokens[0, 0] for output in outputs] == [model.generate(state) for state in states] * 2
    assert {output.done[0].path for output in outputs} == {"handoff"}
    assert {output.done[0].times.transport for output in outputs} == {transport}


@pytest.mark.covers("A10.146")
@pytest.mark.long
@pytest.mark.parametrize("point", ["prefill.before_chunk", "prefill.between_chunks", "kv.before_send_commit"])
def test_an_image_is_encoded_elsewhere_after_its_instance_died(
    model: ImageModel, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = _prompts(model)
    no_probes = functools.partial(ControlLimits, probe_after_s=math.inf, ready_window_s=math.inf)
    monkeypatch.setattr("pdserve.verify_runs.ControlLimits", no_probes)  # a probe would meet the fault

    async def run() -> list[RecordedOutput]:
        deployment = _deployment(model, tmp_path, "tcp", num_prefill=2, dies=f"{point}=kill9")
        async with serving(tmp_path, deployment) as control:
            await _all_living(control, 3)  # else the other P may get every prompt
            return await _run(control, states)

    outputs = asyncio.run(run())

    assert [output.tokens[0, 0] for output in outputs] == [model.generate(state) for state in states]
    assert max(output.done[0].tries for output in outputs) > 1
    assert f"point={point}" in (tmp_path / "prefill-0.log").read_text()


@pytest.mark.covers("B.images.6")
@pytest.mark.long
def test_kv_that_a_decode_instance_drops_is_computed_again(model: ImageModel, tmp_path: Path) -> None:
    """D has room for two prompts but not for both answers, and none to swap to; P encodes no image a second time."""
    states = [replace(one, params=replace(one.params, max_tokens=_LONG)) for one in _prompts(model)]
    few = ("--kv-cache-memory=160KiB", "--swap-bytes=0")

    async def run() -> list[RecordedOutput]:
        async with serving(tmp_path, _deployment(model, tmp_path, "shm", decode_flags=few)) as control:
            outputs = await _run(control, states)
            (decode,) = (one for one in control.registry.living() if one.description.role == "decode")
            assert decode.load.preemptions > 0
            found, encoded = _prefill_load(control)
            assert found > 2 * len(states)
            assert encoded == len(_FILES)
            return outputs

    outputs = asyncio.run(run())

    assert [output.tokens[0, 0] for output in outputs] == [model.generate(state) for state in states]


async def _all_living(control: Control, count: int) -> None:
    async with asyncio.timeout(FIRST_TOKEN_TIMEOUT_S):
        while len(list(control.registry.living())) < count:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.05)


def _prefill_load(control: Control) -> tuple[int, int]:
    """Return how many images were looked up and encoded on the prefill instance, as heartbeats report them."""
    (prefill,) = (one for one in control.registry.living() if one.description.role == "prefill")
    load = prefill.load
    return load.images_sought, load.images_encoded
