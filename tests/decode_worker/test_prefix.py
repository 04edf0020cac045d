"""The decode half's prefix cache: tickets request the rest, every finish unpins, and only a commit names blocks."""

from dataclasses import replace

import pytest

from tests.decode_worker.test_worker import Half
from tests.engine.fake_engines import CONFIG, engine, prompt
from wire.convert import describe_prompt
from wire.errors import HandoffFailed
from wire.messages import Refused, Reserved
from wire.types import PromptImage, PromptState, Ticket

CACHED = replace(CONFIG, block_size=16, num_blocks=8, takes_images=True)
STATE = replace(prompt("d", 40, max_tokens=2), cache_salt="t")


def reserve(it: Half, state: PromptState) -> Ticket:
    it.worker.reserve(it, state)
    reserved = it.events[-1]
    assert isinstance(reserved, Reserved), reserved
    return reserved.ticket


def hand_off(it: Half, state: PromptState) -> Ticket:
    """Reserve, commit and generate to the end."""
    ticket = reserve(it, state)
    it.commit(ticket.ticket_id, replace(state, outputs=((5,),)))
    it.turn_until_idle()
    return ticket


def test_a_ticket_requests_only_tokens_not_in_the_cache() -> None:
    with engine(CACHED) as (core, _):
        it = Half(core)
        assert hand_off(it, STATE).first_token == 0
        assert core.blocks.num_used == 0
        ticket = reserve(it, replace(STATE, prompt_id="next", token_ids=(*STATE.token_ids[:35], 1, 2, 3)))
        other = reserve(it, replace(STATE, prompt_id="other", token_ids=STATE.token_ids[:33]))

        assert (ticket.first_token, other.first_token) == (32, 32)
        assert it.receiver.tickets[ticket.ticket_id][:2] == it.receiver.tickets[other.ticket_id][:2]
        assert core.blocks.num_used == 4
        it.worker.cancel_all(it, "enough")


def test_a_fully_cached_prompt_requests_no_token() -> None:
    whole = replace(STATE, token_ids=STATE.token_ids[:32])
    with engine(CACHED) as (core, _):
        it = Half(core)
        hand_off(it, whole)

        assert hand_off(it, replace(whole, prompt_id="again")).first_token == 32
        assert core.blocks.num_used == 0


@pytest.mark.parametrize("ending", ["cancel", "abort", "refused commit"])
def test_a_ticket_that_ends_unpins_the_prefix_and_names_nothing_new(ending: str) -> None:
    longer = replace(STATE, prompt_id="longer", token_ids=(*STATE.token_ids, *range(40)))
    with engine(CACHED) as (core, _):
        it = Half(core)
        hand_off(it, STATE)
        ticket = reserve(it, longer)
        assert (ticket.first_token, core.blocks.num_used, core.blocks.num_cached) == (32, 5, 0)
        match ending:
            case "cancel":
                it.worker.cancel(it, "longer", None, "enough", it.send_tokens)
            case "abort":
                it.receiver.abort(ticket.ticket_id, "a digest did not hold")
            case _:
                it.commit(ticket.ticket_id, replace(longer, token_ids=longer.token_ids[::-1], outputs=((5,),)))
        it.turn_until_idle()

        assert (core.blocks.num_used, core.blocks.num_cached) == (0, 2)
        assert reserve(it, longer).first_token == 32
        it.worker.cancel_all(it, "enough")


def test_another_tenant_and_a_probe_find_no_prefix() -> None:
    with engine(CACHED) as (core, _):
        it = Half(core)
        hand_off(it, STATE)

        assert reserve(it, replace(STATE, prompt_id="x", cache_salt="other")).first_token == 0
        assert reserve(it, replace(STATE, prompt_id="probe", probe=True)).first_token == 0
        it.worker.cancel_all(it, "enough")


@pytest.mark.parametrize(
    "change", [{"cache_salt": "other"}, {"probe": True}, {"images": (PromptImage(0, 1, b"a" * 32, (1, 1, 1)),)}]
)
def test_a_commit_for_another_tenant_or_image_is_refused(change: dict[str, object]) -> None:
    with engine(CACHED) as (core, _):
        it = Half(core)
        ticket = reserve(it, STATE)
        lie = replace(STATE, outputs=((5,),), **change)  # type: ignore[arg-type]

        with pytest.raises(HandoffFailed, match="describes a different prompt"):
            it.worker.committed(ticket.ticket_id, describe_prompt(lie), it.receiver.tickets[ticket.ticket_id], 1)
        it.worker.cancel_all(it, "enough")


def test_a_cached_prefix_makes_room_for_a_prompt() -> None:
    long = replace(prompt("a", 90, max_tokens=9), cache_salt="t")
    with engine(CACHED) as (core, _):
        it = Half(core)
        it.commit(reserve(it, long).ticket_id, replace(long, outputs=((5,),)))
        it.turn()
        it.worker.reserve(it, replace(long, prompt_id="b", cache_salt="other"))
        assert isinstance(it.events[-1], Refused)

        assert reserve(it, replace(long, prompt_id="c")).first_token == 80
        it.worker.cancel_all(it, "enough")
        it.turn_until_idle()
