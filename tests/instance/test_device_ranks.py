"""Several ranks on devices, each a process with its own pool and links: the tokens equal transformers'."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from devices import cpu, table
from devices.collectives import COLLECTIVES
from engine.oracle import generate_greedy
from instance import ranks
from instance.local import LocalInstance
from kvtransfer.process_group.link_ends import GroupInlet
from kvtransfer.stream import LinkLost
from security.secret import Secret
from security.trust import Trust
from tests.devices.fake_device import VISIBLE, CardKind, FakeKind
from tests.devices.stream import STREAM, StreamKind, stream_collective
from tests.devices.stream_rank import COLLECTIVE, NOTES, PROGRAM, nccl_collective
from tests.engine.tiny_models import make_tiny_model
from tests.instance.device_pair import (
    NUM_TOKENS,
    PROMPTS,
    START_S,
    config,
    cross,
    prompt,
    rest_of,
    serve_alone,
    serve_pair,
)
from tests.instance.pair import running
from tests.instance.test_handoff import wait_empty
from tests.kvtransfer.every_transport import MOONCAKE
from tests.kvtransfer.groups import group_threads
from tests.kvtransfer.nccl_notes import Notes
from tests.kvtransfer.nccl_rules import NcclRules
from tests.kvtransfer.rig import until
from wire.errors import ConfigError, PdserveError
from wire.load import LinkStatus
from wire.messages import Failed, Generate, LinkMeasured, MeasureLink, Prefill, Reserve, Reserved
from wire.types import Role, StageTimes

ROOT = Path(__file__).parents[2]
THE_END = "without it this instance cannot continue"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("ranks") / "llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    """The tokens that transformers generates after each prompt."""
    return generate_greedy(model, PROMPTS, NUM_TOKENS, dtype="float32", ignore_eos=True)


@pytest.fixture(autouse=True)
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device, here and in the processes of ranks."""
    monkeypatch.setitem(table.KINDS, "fake", CardKind())
    monkeypatch.setattr(ranks, "DEVICE_PROGRAM", "tests.devices.fake_rank")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.long
def test_two_ranks_on_devices_generate_as_transformers(model: Path, reference: list[list[int]]) -> None:
    assert serve_alone(config(model, Role.COMBINED, "fake", None, ranks=2)) == reference


@pytest.mark.long
@pytest.mark.parametrize(
    ("p_side", "d_side", "transport"),
    [
        (("cpu", 2, 16), ("fake", 2, 32), "tcp"), (("fake", 2, 32), ("fake", 2, 16), "tcp"),
        (("fake", 1, 16), ("fake", 2, 32), "tcp"),
        *(pytest.param(("fake", p, 16), ("fake", d, 32), "mooncake", marks=MOONCAKE) for p, d in ((2, 2), (2, 1))),
    ],
    ids=["cpu-ranks-to-ranks", "ranks-to-ranks", "one-to-ranks", "mooncake", "mooncake-ranks-to-one"],
)  # fmt: skip
def test_a_prompt_is_handed_off_between_ranks_on_devices(
    p_side: tuple[str, int, int], d_side: tuple[str, int, int], transport: str, model: Path,
    reference: list[list[int]],
) -> None:  # fmt: skip
    (p_device, p_ranks, p_block), (d_device, d_ranks, d_block) = p_side, d_side
    prefill = config(model, Role.PREFILL, p_device, p_block, transport, ranks=p_ranks, port=4)
    decode = config(model, Role.DECODE, d_device, d_block, transport, ranks=d_ranks, port=6)

    outputs, transports = serve_pair(prefill, decode)

    assert outputs == reference
    assert transports == {transport}


def use_streams(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the fake device with a stream, and this collective for its ranks, here and in their processes."""
    monkeypatch.setitem(table.KINDS, "fake", StreamKind(collective))
    monkeypatch.setitem(COLLECTIVES, collective, stream_collective(collective))
    monkeypatch.setattr(ranks, "DEVICE_PROGRAM", PROGRAM)
    monkeypatch.setenv(COLLECTIVE, collective)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[NcclRules]:
    """Ranks with sums on streams, and links under NCCL's rules."""
    notes = Notes(tmp_path)
    rules = NcclRules(notes)
    use_streams("nccl", monkeypatch)
    monkeypatch.setitem(COLLECTIVES, "nccl", nccl_collective(rules))
    monkeypatch.setenv(NOTES, str(tmp_path))
    yield rules
    assert notes.broken() == []
    until(lambda: not group_threads())


@pytest.mark.long
@pytest.mark.parametrize("collective", ["nccl", "hccl"])
def test_layers_reported_ahead_of_the_ranks_are_handed_off(
    collective: str, model: Path, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums stay on the streams, so rank 0 may report a layer before another rank has launched it."""
    use_streams(collective, monkeypatch)
    prefill = config(model, Role.PREFILL, "fake", 16, "tcp", ranks=2, port=4)
    decode = config(model, Role.DECODE, "fake", 32, "tcp", ranks=2, port=6)

    assert serve_pair(prefill, decode) == (reference, {"tcp"})


@pytest.mark.long
@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(1, 2), (2, 2), (2, 1)])
def test_ranks_hand_off_over_nccl_beside_their_sums(
    p_ranks: int, d_ranks: int, model: Path, reference: list[list[int]], nccl: NcclRules
) -> None:
    """Each rank's links are in its own process; no transport is named. Graphs contain D's sums."""
    prefill = config(model, Role.PREFILL, "fake", 16, ranks=p_ranks, port=4)
    decode = config(model, Role.DECODE, "fake", 32, ranks=d_ranks, port=6)

    with STREAM.watched() as seen:
        assert serve_pair(prefill, decode) == (reference, {"process_group"})
    assert seen.count("replay") > NUM_TOKENS
    assert nccl.notes is not None
    assert nccl.notes.links() == max(p_ranks, d_ranks)


@pytest.mark.long
def test_a_link_that_hangs_costs_no_rank(
    model: Path, reference: list[list[int]], nccl: NcclRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst case: a device runs all in one queue, so the sums behind a frame that nobody receives wait as well."""
    nccl.waits_for_receive = True
    monkeypatch.setattr(STREAM, "ahead", nccl.queue)
    losses: Future[PdserveError] = Future()
    p_config = config(model, Role.PREFILL, "fake", 16, ranks=2, port=4)
    prefill = replace(p_config, options=replace(p_config.options, rank_timeout=8.0))
    goes_on = threading.Event()

    def hang(inlet: GroupInlet, frame: object, target: object, stop: object) -> None:
        assert goes_on.wait(START_S)
        raise LinkLost("this end hung")

    async def run() -> list[int | None]:
        async with (
            asyncio.timeout(START_S),
            running(prefill, losses.set_result, lease_s=START_S) as (_, p),
            running(config(model, Role.DECODE, "fake", 32, port=6), lease_s=START_S) as (_, d),
        ):
            monkeypatch.setattr(GroupInlet, "move", hang)
            await d.session.send(Reserve(prompt(2)))
            reserved = await d.next(Reserved)
            assert isinstance(reserved, Reserved)
            await p.session.send(Prefill(prompt(2), reserved.ticket))
            assert isinstance(await p.next(Failed), Failed)
            goes_on.set()
            await p.session.send(Generate(prompt(1)))
            tokens = await rest_of(p)
            await wait_empty(p, d)
            return tokens

    assert asyncio.run(run()) == reference[1]
    assert not losses.done()


@pytest.mark.long
def test_device_and_cpu_ranks_hand_off_and_resend_no_prefix(model: Path, reference: list[list[int]]) -> None:
    """Both prove the cluster secret on every link; the rank's process received it at its start."""
    trust = Trust(Secret(b"of this cluster, and of no other"))
    one = replace(config(model, Role.COMBINED, "fake", 16, "tcp", ranks=2, port=4), trust=trust)
    other = replace(config(model, Role.COMBINED, "cpu", 16, "tcp", port=6), trust=trust)

    async def run() -> tuple[list[tuple[list[int | None], StageTimes]], LinkStatus | None]:
        async with (
            asyncio.timeout(START_S),
            running(one, lease_s=START_S) as (_, ranks),
            running(other, lease_s=START_S) as (cpu_instance, cpu),
        ):
            served = [await cross(ranks, cpu, 2), await cross(cpu, ranks, 1), await cross(cpu, ranks, 1)]
            await wait_empty(ranks, cpu)
            it = cpu_instance._host.describe()
            await ranks.session.send(MeasureLink(it.instance_id, it.epoch, it.endpoints, 1 << 20))
            measured = await ranks.next(LinkMeasured)
            assert isinstance(measured, LinkMeasured), measured
            return served, measured.link

    served, link = asyncio.run(run())

    assert [tokens for tokens, _ in served] == [reference[2], reference[1], reference[1]]
    assert {times.transport for _, times in served} == {"tcp"}
    assert 0 < served[2][1].kv_bytes < served[1][1].kv_bytes
    assert link is not None
    assert (link.state, link.bytes_per_s > 0) == ("up", True)


@pytest.mark.long
@pytest.mark.parametrize("lost_side", ["prefill", "decode"])
def test_a_rank_killed_in_a_hand_off_frees_the_peers_blocks(
    lost_side: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = {"prefill": ("fake", 2), "decode": ("cpu", 1)}
    if lost_side == "decode":
        sides = {"prefill": ("cpu", 1), "decode": ("fake", 2)}
    prefill, decode = (
        config(model, role, sides[role][0], 16, "tcp", ranks=sides[role][1], port=port)
        for role, port in ((Role.PREFILL, 4), (Role.DECODE, 6))
    )
    losses: Future[PdserveError] = Future()

    async def run() -> None:
        async with (
            asyncio.timeout(START_S),
            running(prefill, losses.set_result, lease_s=START_S) as (p_instance, p),
            running(decode, losses.set_result, lease_s=START_S) as (d_instance, d),
        ):
            process = rank_1(p_instance if lost_side == "prefill" else d_instance)
            kill_at_the_first_put(p_instance, process, monkeypatch)
            await d.session.send(Reserve(prompt(2)))
            reserved = await d.next(Reserved)
            assert isinstance(reserved, Reserved)
            await p.session.send(Prefill(prompt(2), reserved.ticket))
            failed = await p.next(Failed)
            assert isinstance(failed, Failed)
            error = await asyncio.to_thread(losses.result, START_S)
            assert str(error) == f"rank 1 of 2 (pid {process.pid}) was killed by SIGKILL; {THE_END}"
            await wait_empty(d if lost_side == "prefill" else p)

    asyncio.run(run())


def rank_1(instance: LocalInstance) -> psutil.Process:
    return psutil.Process(instance._host.engine._model.rank_pids[0])  # type: ignore[attr-defined]


def kill_at_the_first_put(instance: LocalInstance, process: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = instance._host.workers.prefill.sender
    put = sender.put

    def kill(ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        put(ticket_id, layer, start, end, block_ids)
        if process.is_running():
            process.kill()

    monkeypatch.setattr(sender, "put", kill)


@pytest.mark.long
def test_an_unsupported_transport_is_refused_leaving_no_rank(model: Path) -> None:
    async def start() -> None:
        async with running(config(model, Role.DECODE, "fake", None, "shm", "tcp", ranks=2)):
            pass

    with pytest.raises(
        ConfigError, match=r"--kv-transport shm: the KV pool is on fake:0: peers can map host memory only"
    ):
        asyncio.run(start())
    assert not [child for child in psutil.Process().children() if "tests.devices.fake_rank" in child.cmdline()]


@pytest.mark.parametrize(
    ("shown", "cards"), [(None, ("0", "1")), ("4,5", ("4", "5")), ("GPU-a, GPU-b,GPU-c", ("GPU-a", "GPU-b"))]
)
def test_each_rank_sees_one_card_of_its_instance(shown: str | None, cards: tuple[str, ...]) -> None:
    environ = {} if shown is None else {VISIBLE: shown}

    assert ranks.deal_cards(CardKind().traits, 2, environ) == cards
    assert ranks.deal_cards(cpu.TRAITS, 2, environ) == ()


def test_fewer_cards_than_ranks_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match="FAKE_VISIBLE_DEVICES='6' shows too few cards for 2 ranks: it shows 1, but each rank needs its own",
    ):
        ranks.deal_cards(CardKind().traits, 2, {VISIBLE: "6"})


def test_a_card_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="FAKE_VISIBLE_DEVICES='1,0,1' names card 1 twice: each rank needs its own"):
        ranks.deal_cards(CardKind().traits, 2, {VISIBLE: "1,0,1"})


@pytest.mark.parametrize(("shown", "count"), [("0,-1", 1), ("0,-1,1", 1), ("-1", 0), ("", 0)])
def test_cards_after_a_negative_one_are_hidden(shown: str, count: int) -> None:
    with pytest.raises(
        ConfigError, match=f"FAKE_VISIBLE_DEVICES='{shown}' shows too few cards for 2 ranks: it shows {count},"
    ):
        ranks.deal_cards(CardKind().traits, 2, {VISIBLE: shown})
    assert ranks.deal_cards(CardKind().traits, 2, {VISIBLE: "3,2,-1,2"}) == ("3", "2")


def test_ranks_under_auto_use_the_cpu_and_name_the_unused_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "npu"):
        monkeypatch.setitem(table.KINDS, name, replace(FakeKind(), why="never asked"))
    monkeypatch.setattr(FakeKind, "sees_card", lambda kind: kind is table.KINDS["npu"])

    assert ranks._unused_cards("cpu") == ()
    assert ranks._unused_cards("auto") == (
        "ranks on the CPU: --device auto uses npu for one rank only; --device npu selects it",
    )
