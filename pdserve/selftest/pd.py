"""Check a tiny random model on the device: P/D = combined = transformers, token for token, all in this process."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import torch

from flags.options import EngineOptions
from instance.config import InstanceConfig
from instance.local import LocalInstance
from pdserve.selftest.check import NotHere, SelftestCheck, Wrong
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.recorded_output import record
from scheduler.request import GenerationRequest
from scheduler.serving import Cluster, build_control
from wire.errors import DeadlineExceeded, HandoffFailed, PdserveError
from wire.types import Role, SamplingParams

_HOST = "127.0.0.1"
_VOCAB, _OUT = 512, 24
_LENGTHS = (1, 15, 17, 130, 200)
_READY_S, _ANSWER_S, _POLL_S = 60.0, 60.0, 0.01
Outputs = list[list[int]]


class TinyModel:
    """The model's folder, its prompts and the reference outputs, shared by the checks of a process."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.notes: tuple[str, ...] = ()
        self.prompts = [[(7 * i + 13 * length) % (_VOCAB - 8) + 5 for i in range(length)] for length in _LENGTHS]

    @functools.cached_property
    def reference(self) -> Outputs:
        """The outputs of plain transformers on the CPU."""
        from engine.oracle import Oracle

        _save_model(self.folder)
        return Oracle(self.folder, "float32").generate_greedy(self.prompts, _OUT, ignore_eos=True)

    def config(self, role: Role, number: int, transport: str | None) -> InstanceConfig:
        """Return the config of one instance."""
        options = EngineOptions(
            model=str(self.folder), dtype="float32", device=self.device, kv_cache_memory=16 << 20, port=number,
            prefill_chunk_size=64, max_model_len=256, kv_transport=() if transport is None else (transport,),
        )  # fmt: skip
        return InstanceConfig(options, role, device_ids=(str(number),))


def model_checks(model: TinyModel, transports: Callable[[], Sequence[str]]) -> Iterator[SelftestCheck]:
    """Yield the checks; `transports` is called when it is needed."""
    yield SelftestCheck("model", "combined = transformers", functools.partial(_combined, model))
    yield SelftestCheck("model", "P/D = transformers", functools.partial(_pd, model, transports))


def _combined(model: TinyModel) -> str:
    reference = model.reference
    _compare(reference, asyncio.run(_serve(model, [(Role.COMBINED, 0)], None, "local")))
    return f"{len(reference)} prompts, {_OUT} tokens each, float32"


def _pd(model: TinyModel, transports: Callable[[], Sequence[str]]) -> str:
    reference, names = model.reference, transports()
    if not names:
        raise NotHere("no transport runs from this device to itself within one process")
    for name in names:
        try:
            outputs = asyncio.run(_serve(model, [(Role.PREFILL, 1), (Role.DECODE, 2)], name, "handoff"))
            _compare(reference, outputs)
        except (Wrong, PdserveError) as error:
            raise Wrong(f"over {name}: {error}") from error
    return f"{len(reference)} prompts over {', '.join(names)}"


def _compare(reference: Outputs, got: Outputs) -> None:
    for number, (one, two) in enumerate(zip(reference, got, strict=True)):
        if one != two:
            place = next((i for i, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), len(two))
            raise Wrong(f"prompt {number} (of {_LENGTHS[number]} tokens) differs from transformers at token {place}")


async def _serve(model: TinyModel, placements: Sequence[tuple[Role, int]], transport: str | None, path: str) -> Outputs:
    instances: dict[str, LocalInstance] = {}
    expected = []
    async with contextlib.AsyncExitStack() as stack:
        for index, (role, number) in enumerate(placements):
            instance = await LocalInstance.start(model.config(role, number, transport))
            stack.push_async_callback(instance.stop)
            model.notes = instance.notes
            address = f"{_HOST}:{number}"
            instances[address] = instance
            expected.append(ExpectedInstance(index, f"{role.value}-0", role, address, _HOST, (str(number),)))
        cluster = Cluster(tuple(expected), lambda address: instances[address].connection())
        async with _running(build_control(cluster, ControlLimits())) as control:
            outputs = (_run_prompt(control, number, prompt, path) for number, prompt in enumerate(model.prompts))
            return list(await asyncio.gather(*outputs))
    raise AssertionError("the stack suppresses no exception")


@contextlib.asynccontextmanager
async def _running(control: Control) -> AsyncIterator[Control]:
    task = asyncio.create_task(control.run())
    try:
        async with asyncio.timeout(_READY_S):
            while not control.ready():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)  # as in `pdserve verify`: the registry does not notify
        yield control
    except TimeoutError as error:
        raise DeadlineExceeded(f"the instances were not ready within {_READY_S:g} s") from error
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await control.dispatch.close(0)


async def _run_prompt(control: Control, number: int, prompt: Sequence[int], path: str) -> list[int]:
    request = GenerationRequest(
        request_id=f"selftest-{number}", prompts=(tuple(prompt),),
        params=SamplingParams(max_tokens=_OUT, temperature=0.0), first_token_timeout_s=_ANSWER_S,
        stall_timeout_s=_ANSWER_S,
    )  # fmt: skip
    output = await record(control.dispatch, request)
    if output.done[0].path != path:
        raise HandoffFailed(f"prompt {number} took the path {output.done[0].path}, not {path}")
    return output.tokens[0, 0]


def _save_model(folder: Path) -> None:
    """Save a random Llama of 0.4 M parameters, with a head size of 64 for all kernels, and well separated logits."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    config = LlamaConfig(
        vocab_size=_VOCAB, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.1)
    network.save_pretrained(folder)
