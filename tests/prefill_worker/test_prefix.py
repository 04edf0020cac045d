"""The prefill half's prefix cache: cached KV is sent without computing it, and counted in the hand-off's times."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.fake_engines import CONFIG, engine, prompt
from tests.prefill_worker.test_worker import STATS, Half, ScriptedSender, ticket_for
from wire.messages import HandedOff

CACHED = replace(CONFIG, block_size=16, num_blocks=16)
STATE = prompt("p", 60)
LAYERS = 2


@dataclass
class Recording(ScriptedSender):
    """Records each put as (layer, start, end)."""

    puts: list[tuple[int, int, int]] = field(default_factory=list)

    def put(self, ticket_id: str, layer: int, start: int, end: int, block_ids: Sequence[int]) -> None:
        assert len(block_ids) * 16 >= end
        self.puts.append((layer, start, end))


@pytest.mark.parametrize(
    ("first_token", "ranges"),
    [
        (0, [(0, 58), (58, 60)]),
        (16, [(16, 58), (58, 60)]),
        (48, [(48, 58), (58, 60)]),
        (60, []),
    ],
)
def test_the_cached_prefix_is_sent_with_the_first_chunk_if_needed(
    first_token: int, ranges: list[tuple[int, int]]
) -> None:
    with engine(CACHED, chunk=10) as (core, _):
        it = Half(core, sender=Recording())
        it.core.add(replace(STATE, prompt_id="before"))
        while it.core.has_work():
            it.core.step()
        it.worker.accept(it, STATE, replace(ticket_for(STATE), first_token=first_token))
        it.turn_until_idle()
        it.worker.acked(ticket_for(STATE).ticket_id, STATS)
        it.turn_until_idle()

        assert isinstance(it.sender, Recording)
        assert it.sender.puts == [(layer, *piece) for piece in ranges for layer in range(LAYERS)]
        (handed_off,) = it.events
        assert isinstance(handed_off, HandedOff)
        assert handed_off.times.cached_tokens == 48


def test_a_prompt_finished_by_its_first_token_reports_cache_use() -> None:
    with engine(CACHED) as (core, _):
        it = Half(core)
        state = prompt("p", 60, max_tokens=1)
        for number in (1, 2):
            it.worker.accept(it, state, ticket_for(state, number))
            it.turn_until_idle()

        times = [event.times for event in it.events if isinstance(event, HandedOff)]
        assert [(one.cached_tokens, one.written_tokens) for one in times] == [(0, 48), (48, 0)]
