"""A chat over one prefill and two decode instances: its next turn goes where its KV is, and only new KV is sent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from instance.local import LocalInstance
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.request import GenerationRequest
from tests.instance.pair import DEADLINE_S, instance_config
from tests.instance.test_prefix_handoff import TOKEN_BYTES
from tests.scheduler.fake_cluster import Answer, Running, collect, control_over
from wire.types import Role, SamplingParams

ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE)
NAMES = ("prefill-0", "decode-0", "decode-1")
FIRST = tuple(range(3, 83))
MAX_MODEL_LEN = 20_000


@contextlib.asynccontextmanager
async def cluster(folder: Path, **options: object) -> AsyncIterator[Control]:
    """Real instances over the fake model, and a scheduler's control plane over all of them."""
    configs = [
        instance_config(folder, role, port=4 + i, max_model_len=MAX_MODEL_LEN, **options)
        for i, role in enumerate(ROLES)
    ]
    instances = [await LocalInstance.start(config) for config in configs]
    by_address = {f"{c.server_ip}:{c.options.port}": one for c, one in zip(configs, instances, strict=True)}
    expected = [
        ExpectedInstance(i, name, config.role, address, config.server_ip, config.device_ids)
        for i, (name, config, address) in enumerate(zip(NAMES, configs, by_address, strict=True))
    ]
    control = control_over(
        expected, lambda address: by_address[address].connection(), ControlLimits(), table_digest=""
    )  # fmt: skip
    serving = asyncio.create_task(control.registry.run())
    try:
        await control.registry.wait_path(DEADLINE_S)
        await until(control, lambda: not control.registry.missing())
        yield control
        await control.dispatch.close(0.0)
    finally:
        serving.cancel()
        await asyncio.wait({serving}, timeout=DEADLINE_S)
        for instance in instances:
            await instance.stop()


async def until(control: Control, condition: Callable[[], bool]) -> None:
    """Wait until `condition` is true; it is checked after each event of an instance."""
    changed = asyncio.Event()
    control.registry.on_change(changed.set)
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            changed.clear()
            await changed.wait()


def request(token_ids: tuple[int, ...], tenant: str = "", max_tokens: int = 20) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest("r", (token_ids,), params, DEADLINE_S, DEADLINE_S, cache_salt=tenant)


async def first_turn_beside_another(control: Control) -> Answer:
    """Serve the chat's first turn while the decode instance that comes first is busy."""
    busy = Running(control.dispatch, request((9, 9, 9), max_tokens=MAX_MODEL_LEN - 100))
    tokens = busy.read()
    await anext(tokens)
    await anext(tokens)  # the first token is P's, the second D's
    answer = await collect(control.dispatch, request(FIRST))
    busy.task.cancel()
    await until(control, lambda: not any(instance.in_flight.sequences for instance in control.registry.living()))
    return answer


def run_turns(folder: Path, tenant: str, **options: object) -> tuple[Answer, Answer]:
    """Return the answers to two turns of a chat, the second one of `tenant`."""

    async def run() -> tuple[Answer, Answer]:
        async with cluster(folder, **options) as control:
            first = await first_turn_beside_another(control)
            second = (*FIRST, *first.tokens[0, 0], *range(100, 120))
            return first, await collect(control.dispatch, request(second, tenant))

    return asyncio.run(run())


def test_the_next_turn_goes_to_decode_with_the_chat_cached(tmp_path: Path) -> None:
    first, second = run_turns(tmp_path, tenant="")

    assert first.done[0].decode_instance == second.done[0].decode_instance == "decode-127.0.0.1:6"
    held = (len(FIRST) + 20 - 1) // 16 * 16
    assert second.done[0].times.kv_bytes // TOKEN_BYTES == len(FIRST) + 40 - held
    assert "cached" in second.done[0].reason


def test_without_a_shared_prefix_only_load_decides_placement(tmp_path: Path) -> None:
    for tenant, options in (("another", {}), ("", {"enable_prefix_caching": False})):
        first, second = run_turns(tmp_path, tenant, **options)

        assert first.done[0].decode_instance == "decode-127.0.0.1:6"
        assert second.done[0].decode_instance == "decode-127.0.0.1:5"
        assert second.done[0].times.kv_bytes // TOKEN_BYTES == len(FIRST) + 40
