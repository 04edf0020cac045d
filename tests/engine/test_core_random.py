"""The engine core under random orders of add, admit, cancel, release, reservations of others, failures, and steps.

One step ahead, the model computes nothing before its collect: a block that is written too early, while a
launched step still writes it, is overwritten then, and answers differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core import EngineCore
from engine.interface import Chunk, Prefilled
from engine.step import PendingStep, StepBatch, StepOutput
from testing.engine.fake_model import FakeConfig, FakeModel, expected_tokens
from tests.examples import examples
from wire.errors import NoCapacity
from wire.types import FinishReason, PromptState, SamplingParams, TokenOutput

CONFIG = FakeConfig(salt=3, num_layers=1, block_size=4, num_blocks=14, vocab_size=60, max_model_len=40)
MAX_STEPS = 1000


class Counting(FakeModel):
    """Counts its steps; fails a launch or a collect when it is set to."""

    num_launched = num_collected = 0
    fails_in: str | None = None

    def launch(self, batch: StepBatch, layer_done: Callable[[int], None] | None = None) -> PendingStep:
        self.num_launched += 1
        if self.fails_in == "launch":
            self.fails_in = None
            raise RuntimeError("device is gone")
        return Counted(self, super().launch(batch, layer_done))

    def copy_now(self, source: int, target: int) -> None:
        """Copy a block as a receiver does: on a thread of its own, not behind what is launched."""
        self._copy_block(source, target)

    def parts_of(self, block: int) -> list[memoryview]:
        """Return the block's bytes, tensor by tensor."""
        layout, buffer = self.info.layout, self.memories[0].buffer
        runs = [layout.runs(tensor, [block], 0, layout.block_size) for tensor in range(len(layout.tensors))]
        return [buffer[run.offset : run.offset + run.length] for (run,) in runs]


class Counted:
    """A step of that model."""

    def __init__(self, model: Counting, pending: PendingStep) -> None:
        self.model, self.pending = model, pending

    def collect(self) -> StepOutput:
        self.model.num_collected += 1
        output = self.pending.collect()
        if self.model.fails_in == "collect":
            self.model.fails_in = None
            raise RuntimeError("device is gone")
        return output


class Driver(RuleBasedStateMachine):
    """Keeps what was reported of every sequence, and compares it with the reference."""

    config = CONFIG
    longest = 20
    swapped_blocks = 0

    def __init__(self) -> None:
        super().__init__()
        self.model = Counting(self.config)
        layout = self.model.info.layout
        self.core = EngineCore(
            self.model, max_num_seqs=5, max_num_batched_tokens=self.longest // 2 - 1,
            prefill_chunk_size=self.longest // 3,
            swap_bytes=self.swapped_blocks * layout.block_size * layout.token_bytes,
        )  # fmt: skip
        self.states: dict[str, PromptState] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.finish: dict[tuple[str, int], FinishReason] = {}
        self.held: dict[str, Prefilled] = {}
        self.tables: dict[str, tuple[int, ...]] = {}
        self.reserved: list[tuple[int, ...]] = []

    @rule(
        share=st.floats(0, 1), max_tokens=st.integers(1, 8), n=st.integers(1, 3), hold=st.booleans(),
        bans=st.sampled_from((0, 0, 0, 1, 2)),
    )  # fmt: skip
    def add(self, share: float, max_tokens: int, n: int, hold: bool, bans: int) -> None:
        name, length = f"p{len(self.states)}", max(1, round(share * self.longest))
        bad_words = tuple((i,) if i % 2 else (i, i + 1) for i in range(5, 5 + 25 * bans))
        params = SamplingParams(
            max_tokens, n=n, seed=length, stop_token_ids=tuple(range(6)), min_tokens=max_tokens // 2,
            bad_words=bad_words,
        )  # fmt: skip
        start = 7 * (length % 2) if self.swapped_blocks else 13 * length
        state = PromptState(name, name, tuple((start + i * 5) % 60 for i in range(length)), params)
        self.core.add(state, hold=hold)
        self.track(state)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hand_off(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        state, blocks = self.held[name].state, self.core.blocks
        prefix = blocks.chain(state).names(state.token_ids, len(state.token_ids) - 1)
        try:
            target, num_held = blocks.take(-(-len(state.token_ids) // self.config.block_size), prefix)
        except NoCapacity:
            return
        for source, block in zip(self.tables[name][num_held:], target[num_held:], strict=True):
            self.model.copy_now(source, block)
        admitted = replace(state, prompt_id=f"{name}-admitted")
        self.core.admit(admitted, target)
        self.track(admitted)
        self.release(name)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), sequence=st.none() | st.integers(0, 2))
    def cancel(self, data: st.DataObject, sequence: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.states)))
        self.take(self.core.cancel(name, sequence))
        if all((name, i) in self.finish for i in range(self.states[name].params.n)):
            self.held.pop(name, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_held(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(self.held))))

    @rule(count=st.integers(1, 5))
    def reserve(self, count: int) -> None:
        if count <= self.core.blocks.num_free:
            self.reserved.append(self.core.blocks.allocate(count))
            for block in self.reserved[-1]:
                for part in self.model.parts_of(block):
                    part[:] = bytes([200 + block]) * len(part)

    @precondition(lambda self: self.reserved)
    @rule()
    def end_reservation(self) -> None:
        block_ids = self.reserved.pop()
        for block in block_ids:
            assert all(set(part) == {200 + block} for part in self.model.parts_of(block)), "a step wrote it"
        self.core.blocks.release(block_ids)

    @rule(call=st.sampled_from(("launch", "collect")))
    def let_one_fail(self, call: str) -> None:
        self.model.fails_in = call

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_once()

    @invariant()
    def the_blocks_add_up(self) -> None:
        self.core.blocks.check()

    def step_once(self) -> None:
        had_work, free, fails = self.core.has_work(), self.core.blocks.num_free, self.model.fails_in is not None
        before = self.model.num_launched + self.model.num_collected
        result = self.core.step(self.on_layer)
        assert fails or result.failed == ()
        assert had_work == (self.model.num_launched + self.model.num_collected > before), f"{free} blocks were free"
        self.take(result.tokens)
        for name, _ in result.failed:
            for i in range(self.states[name].params.n):
                assert (name, i) in self.finish or self.core._batch.find(name) is None
                self.finish.setdefault((name, i), FinishReason.CANCELLED)
        self.held.update({done.state.prompt_id: done for done in result.prefilled if not done.finished})

    def teardown(self) -> None:
        while self.reserved:
            self.end_reservation()
        for _ in range(MAX_STEPS):
            for name in list(self.held):
                self.release(name)
            if not self.core.has_work():
                break
            self.step_once()
        wanted = {(name, i) for name, state in self.states.items() for i in range(state.params.n)}
        used, load = self.core.blocks.num_used, self.core.load()
        self.core.blocks.check()
        self.model.close()
        assert set(self.finish) == wanted
        assert (used, load.running, load.waiting, load.held_prompts) == (0, 0, 0, 0)

    def track(self, state: PromptState) -> None:
        """Register a prompt; an admitted one already has its first token, which may have ended its sequence."""
        self.states[state.prompt_id] = state
        origin = state.prompt_id.removesuffix("-admitted")
        for i, given in enumerate(state.outputs):
            self.outputs[state.prompt_id, i] = list(given)
            ended = self.finish.get((origin, i))
            if ended in (FinishReason.STOP, FinishReason.LENGTH):
                self.finish[state.prompt_id, i] = ended

    def take(self, outputs: tuple[TokenOutput, ...]) -> None:
        for output in outputs:
            key = output.prompt_id, output.sequence
            assert key not in self.finish, f"{output} after its end"
            reported = self.outputs.setdefault(key, [])
            assert output.index == len(reported), f"{output} after {len(reported)} tokens"
            if output.token_id is not None:
                reported.append(output.token_id)
            if output.finish is not None:
                self.finish[key] = output.finish
                self.compare(key)

    def compare(self, key: tuple[str, int]) -> None:
        state, reported = self.states[key[0]], self.outputs[key]
        assert tuple(reported) == expected_tokens(
            CONFIG, state.token_ids, state.params, count=len(reported), salts=[CONFIG.salt], sequence=key[1]
        )
        if self.finish[key] is FinishReason.LENGTH:
            assert len(reported) == state.params.max_tokens
        if self.finish[key] is FinishReason.STOP:
            assert reported[-1] in state.params.stop_token_ids

    def release(self, name: str) -> None:
        """End a held prompt; its sequences continue elsewhere, which ends them here."""
        del self.held[name]
        self.core.release(name)
        for i in range(self.states[name].params.n):
            self.finish.setdefault((name, i), FinishReason.CANCELLED)

    def on_layer(self, layer: int, chunks: Sequence[Chunk]) -> None:
        self.tables.update({chunk.prompt_id: chunk.block_ids for chunk in chunks})


class AheadDriver(Driver):
    """The same over a model that runs ahead."""

    config = replace(CONFIG, runs_ahead=True)


class CachingDriver(Driver):
    """The same with prompts that have their beginnings in common, a prefix cache, and a small swap area."""

    config = replace(CONFIG, block_size=16, num_blocks=11, max_model_len=80)
    longest = 50
    swapped_blocks = 3


class CachingAheadDriver(CachingDriver):
    """Both."""

    config = replace(CachingDriver.config, runs_ahead=True)


TestDriver, TestAheadDriver = Driver.TestCase, AheadDriver.TestCase
TestCachingDriver, TestCachingAheadDriver = CachingDriver.TestCase, CachingAheadDriver.TestCase
TestDriver.settings = examples(150, steps=30)
TestAheadDriver.settings = TestDriver.settings
TestCachingDriver.settings = examples(80, steps=30)
TestCachingAheadDriver.settings = TestCachingDriver.settings
