"""The hand-off path and the local path over fake instances, on virtual time."""

import asyncio
import random

import pytest

from tests.scheduler.fake_cluster import FakeCluster, Running, collect, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.errors import DeadlineExceeded, HandoffFailed, Incompatible, InstanceLost, InternalError, NeverFits
from wire.messages import Cancel, Heartbeat, Prefill, Reserve
from wire.types import FinishReason

PROMPT = (5, 6, 7)


@virtual
async def test_first_token_from_prefill_and_the_rest_from_decode() -> None:
    async with FakeCluster("PD").serving() as cluster:
        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert answer.tokens == {(0, 0): expected(PROMPT, 4)}
        assert answer.finishes == {(0, 0): FinishReason.LENGTH}
        done = answer.done[0]
        assert (done.path, done.prefill_instance, done.decode_instance) == ("handoff", "prefill-0", "decode-1")
        assert done.times.queue_s == 0.0
        assert None not in (done.times.reserve_s, done.times.prefill_s, done.times.send_s, done.times.first_step_s)
        assert cluster.blocks_used == [0, 0]
        assert not any(isinstance(command, Cancel) for i in cluster.instances for command in i.commands)


@virtual
async def test_decode_tokens_that_overtake_the_first_one_are_held() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].behaviour.lag_s = 0.5

        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert answer.tokens == {(0, 0): expected(PROMPT, 4)}
        assert answer.done[0].times.kv_bytes > 0


@virtual
async def test_repeated_tokens_are_dropped() -> None:
    async with FakeCluster("PD").serving() as cluster:
        for instance in cluster.instances:
            instance.behaviour.repeat_tokens = True

        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert answer.tokens == {(0, 0): expected(PROMPT, 4)}


@pytest.mark.parametrize("lag_s", [0.0, 0.5])
@virtual
async def test_a_first_token_that_ends_everything_leaves_decode_idle(lag_s: float) -> None:
    first = expected(PROMPT, 1)
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].behaviour.lag_s = lag_s  # decode's "ticket aborted" comes before prefill's last token

        answer = await collect(cluster.control.dispatch, request(PROMPT, stop_token_ids=(first[0],)))
        await until(lambda: cluster.blocks_used == [0, 0])

        assert answer.tokens == {(0, 0): expected(PROMPT, 1)}
        assert answer.done[0].times.prefill_s is not None
        assert answer.done[0].path == "handoff"
        assert cluster.instances[1].steps == 0


@pytest.mark.parametrize("n", [1, 3])
@virtual
async def test_a_single_token_is_generated_on_prefill_without_decode(n: int) -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[1].commands.clear()

        answer = await collect(cluster.control.dispatch, request(PROMPT, max_tokens=1, n=n))
        await until(lambda: cluster.blocks_used == [0, 0])

        assert answer.tokens == {(0, sequence): expected(PROMPT, 1, sequence) for sequence in range(n)}
        assert answer.done[0].times.prefill_s is not None
        assert (answer.done[0].path, answer.done[0].prefill_instance) == ("local", None)
        assert answer.done[0].reason.startswith("prefill-0: no token after the first")
        assert {type(command) for command in cluster.instances[1].commands} <= {Heartbeat}


@virtual
async def test_a_single_token_needs_no_decode_instance_nor_makes_it_ready() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.kill(1)
        await until(lambda: not cluster.control.ready())

        answer = await collect(cluster.control.dispatch, request(PROMPT, max_tokens=1))

        assert answer.tokens == {(0, 0): expected(PROMPT, 1)}
        assert not cluster.control.ready()


@virtual
async def test_only_one_of_n_sequences_ends_at_its_stop_token() -> None:
    stop_id = expected(PROMPT, 2, sequence=1)[1]
    async with FakeCluster("PD").serving() as cluster:
        answer = await collect(cluster.control.dispatch, request(PROMPT, n=3, stop_token_ids=(stop_id,)))

        assert answer.tokens[0, 0] == expected(PROMPT, 4, 0)
        assert answer.tokens[0, 1] == expected(PROMPT, 2, 1)
        assert answer.finishes[0, 1] is FinishReason.STOP
        assert cluster.blocks_used == [0, 0]


@virtual
async def test_a_stop_sequence_ends_at_the_reader_and_on_decode() -> None:
    async with FakeCluster("PD").serving() as cluster:
        running = Running(
            cluster.control.dispatch, request(PROMPT, n=2, max_tokens=50),
            lambda token: (token.sequence, token.index) == (0, 2),
        )  # fmt: skip
        await running.task

        assert running.tokens == {(0, 0): expected(PROMPT, 3), (0, 1): expected(PROMPT, 50, 1)}
        assert running.finishes == {(0, 1): FinishReason.LENGTH}
        assert cluster.blocks_used == [0, 0]


@virtual
async def test_a_sequence_stopped_before_decode_has_it_spares_the_others() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].behaviour.send_s = 1.0
        requested = request(PROMPT, n=2, max_tokens=20)
        running = Running(cluster.control.dispatch, requested, lambda token: token.sequence == 0)
        await running.task
        await until(lambda: cluster.blocks_used == [0, 0])

        assert running.tokens == {(0, 0): expected(PROMPT, 1), (0, 1): expected(PROMPT, 20, 1)}


@virtual
async def test_stopping_every_sequence_ends_the_request() -> None:
    async with FakeCluster("PD").serving() as cluster:
        running = Running(cluster.control.dispatch, request(PROMPT, max_tokens=1000), lambda token: token.index == 2)
        await running.task
        await until(lambda: cluster.blocks_used == [0, 0])

        assert running.tokens == {(0, 0): expected(PROMPT, 3)}
        assert cluster.control.dispatch.ledger.completed == 1


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.005, 0.013, 0.03, 0.2])
@virtual
async def test_a_client_that_disconnects_leaves_no_blocks_anywhere(after_s: float) -> None:
    async with FakeCluster("PD").serving() as cluster:
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT, max_tokens=1000)))
        await asyncio.sleep(after_s)
        reader.cancel()
        await asyncio.sleep(0.01)

        assert cluster.blocks_used == [0, 0]
        assert cluster.control.dispatch.ledger.cancelled == 1
        assert cluster.control.dispatch.ledger.inflight == 0


@virtual
async def test_a_client_that_leaves_while_queued_reaches_no_instance() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].get_stuck()
        long = tuple(range(100))
        first = asyncio.create_task(collect(cluster.control.dispatch, request(long)))
        second = asyncio.create_task(collect(cluster.control.dispatch, request(long)))
        await until(lambda: cluster.blocks_used == [7, 7])
        assert cluster.control.dispatch.admission.num_waiting == 1
        second.cancel()
        await asyncio.sleep(0.01)

        assert cluster.control.dispatch.admission.num_waiting == 0
        assert sum(isinstance(command, Reserve) for command in cluster.instances[1].commands) == 1
        first.cancel()
        await asyncio.sleep(0.01)
        assert cluster.blocks_used == [0, 0]


@virtual
async def test_decode_without_room_is_retried_only_after_its_next_load() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[1].behaviour.refuse.extend(["NoCapacity", "NoCapacity"])
        loop = asyncio.get_running_loop()
        started = loop.time()

        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert answer.tokens == {(0, 0): expected(PROMPT, 4)}
        assert sum(isinstance(command, Reserve) for command in cluster.instances[1].commands) == 3
        assert sum(isinstance(command, Prefill) for command in cluster.instances[0].commands) == 1
        assert 1.0 <= loop.time() - started <= 2.5  # two heartbeats


@virtual
async def test_an_unanswered_reservation_is_retried_on_another_decode() -> None:
    async with FakeCluster("PDD").serving() as cluster:
        cluster.instances[1].behaviour.ignores_commands = True

        answer = await collect(cluster.control.dispatch, request(PROMPT))

        assert answer.done[0].decode_instance == "decode-2"
        assert cluster.control.dispatch.ledger.retried_prompts == 1


@virtual
async def test_any_other_refusal_becomes_the_requests_error() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[1].behaviour.refuse += ["InternalError"] * 2

        with pytest.raises(InternalError, match=r"^decode-0: it failed"):
            await collect(cluster.control.dispatch, request(PROMPT))
        with pytest.raises(NeverFits, match=r"1025 tokens.*1024"):
            await collect(cluster.control.dispatch, request(tuple(range(1025))))


@pytest.mark.parametrize("victim", [0, 1])
@virtual
async def test_a_killed_instance_fails_its_requests_with_a_message(victim: int) -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[0].behaviour.send_s = 0.5
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT, max_tokens=1000)))
        await until(lambda: any(p.stage == "sending" for p in cluster.instances[0].prompts.values()))
        loop = asyncio.get_running_loop()
        killed_at = loop.time()
        cluster.kill(victim)

        with pytest.raises(InstanceLost, match=rf"^{('prefill-0', 'decode-0')[victim]} was lost: "):
            await reader
        assert loop.time() - killed_at < 3.0
        await asyncio.sleep(0.01)
        assert cluster.blocks_used == [0, 0]


@virtual
async def test_losing_prefill_after_the_hand_off_changes_nothing() -> None:
    async with FakeCluster("PD").serving() as cluster:
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT, max_tokens=200)))
        await until(lambda: cluster.instances[1].steps > 10)
        cluster.kill(0)

        assert (await reader).tokens == {(0, 0): expected(PROMPT, 200)}


@pytest.mark.parametrize("victim", [0, 2])
@virtual
async def test_a_pair_failing_before_the_first_token_is_replaced(victim: int) -> None:
    async with FakeCluster("PPDD").serving() as cluster:
        cluster.instances[0].behaviour.step_s = 1.0
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT)))
        await until(lambda: cluster.blocks_used == [1, 0, 1, 0])
        cluster.kill(victim)
        answer = await reader

        assert answer.tokens == {(0, 0): expected(PROMPT, 4)}
        assert cluster.control.dispatch.ledger.retried_prompts == 1
        assert cluster.blocks_used == [0, 0, 0, 0]


@virtual
async def test_a_hand_off_that_fails_on_every_pair_tried_is_an_error() -> None:
    async with FakeCluster("PPDD").serving() as cluster:
        for instance in cluster.instances[:2]:
            instance.behaviour.fail_handoffs = 9

        with pytest.raises(HandoffFailed, match="the KV transfer from"):
            await collect(cluster.control.dispatch, request(PROMPT))
        await asyncio.sleep(0.01)
        assert cluster.blocks_used == [0, 0, 0, 0]
        assert cluster.control.dispatch.ledger.failed == 1
        assert cluster.control.dispatch.ledger.retried_prompts == 1


@pytest.mark.parametrize("victim", [0, 1])
@virtual
async def test_limits_to_the_first_token_and_without_progress(victim: int) -> None:
    async with FakeCluster("PD").serving() as cluster:
        if victim == 0:
            cluster.instances[0].get_stuck()
        reader = asyncio.create_task(
            collect(cluster.control.dispatch, request(PROMPT, limits_s=(2.0, 3.0), max_tokens=1000))
        )
        if victim == 1:
            await until(lambda: cluster.instances[1].steps > 3)
            cluster.instances[1].get_stuck()

        limit = "no first token within 2 s, in prefill on" if victim == 0 else "no progress for 3 s, decoding on"
        with pytest.raises(DeadlineExceeded, match=limit):
            await reader
        await asyncio.sleep(0.01)
        assert cluster.blocks_used == [0, 0]


@pytest.mark.parametrize("how", ["stuck", "frozen"])
@virtual
async def test_a_hung_instance_is_found_within_ten_seconds(how: str) -> None:
    async with FakeCluster("PD").serving() as cluster:
        reader = asyncio.create_task(
            collect(cluster.control.dispatch, request(PROMPT, limits_s=(99, 99), max_tokens=900))
        )
        await until(lambda: cluster.instances[1].steps > 3)
        loop = asyncio.get_running_loop()
        hung_at = loop.time()
        if how == "stuck":
            cluster.instances[1].get_stuck()
        else:
            cluster.network.freeze(cluster.expected[1].address)

        with pytest.raises(InstanceLost, match=r"no progress for|no message for"):
            await reader
        assert loop.time() - hung_at <= 10.0
        assert not cluster.control.ready()


@virtual
async def test_several_prompts_are_placed_alone_and_answered_together() -> None:
    prompts = tuple((i, i + 1) for i in range(6))
    async with FakeCluster("PPDD").serving() as cluster:
        answer = await collect(cluster.control.dispatch, request(*prompts))

        assert answer.tokens == {(i, 0): expected(prompt, 4) for i, prompt in enumerate(prompts)}
        assert len({(done.prefill_instance, done.decode_instance) for done in answer.done.values()}) > 1


@virtual
async def test_one_failing_prompt_fails_its_whole_request() -> None:
    async with FakeCluster("PD").serving() as cluster:
        cluster.instances[1].behaviour.refuse.append("Incompatible")

        with pytest.raises(Incompatible):
            await collect(cluster.control.dispatch, request((1,), (2,), (3,), max_tokens=1000))
        await asyncio.sleep(0.01)
        assert cluster.blocks_used == [0, 0]


@virtual
async def test_a_combined_instance_serves_alone() -> None:
    async with FakeCluster("C").serving() as cluster:
        answer = await collect(cluster.control.dispatch, request(PROMPT, n=2))

        assert answer.tokens == {(0, s): expected(PROMPT, 4, s) for s in range(2)}
        assert answer.done[0].path == "local"
        reader = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT, max_tokens=1000)))
        await until(lambda: cluster.blocks_used == [1])
        reader.cancel()
        await asyncio.sleep(0.01)
        assert cluster.blocks_used == [0]


@virtual
async def test_two_hundred_requests_half_cancelled_at_random_leave_nothing() -> None:
    rng = random.Random(7)
    async with FakeCluster("PPDD").serving() as cluster:
        dispatch = cluster.control.dispatch
        readers = []
        for _ in range(200):
            prompt = tuple(rng.randrange(100) for _ in range(rng.randrange(1, 200)))
            requested = request(prompt, max_tokens=rng.randrange(1, 30), limits_s=(999, 999))
            readers.append((prompt, asyncio.create_task(collect(dispatch, requested))))
            await asyncio.sleep(rng.random() * 0.02)
        for _, reader in rng.sample(readers, 100):
            await asyncio.sleep(rng.random() * 0.02)
            reader.cancel()
        await asyncio.wait([reader for _, reader in readers])
        await until(lambda: cluster.blocks_used == [0, 0, 0, 0])

        for prompt, reader in readers:
            if not reader.cancelled():
                tokens = reader.result().tokens[0, 0]
                assert tokens == expected(prompt, len(tokens))
        ledger = dispatch.ledger
        assert (ledger.received, ledger.failed, ledger.inflight) == (200, 0, 0)
        assert ledger.completed + ledger.cancelled == 200
        for instance in cluster.control.registry.living():
            assert instance.in_flight.outstanding_tokens == 0
