"""Turn a plan into a grant: its instances, and the bookings on them until their loads include the prompt."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

from scheduler.adoption import Adoption
from scheduler.instances import Instance
from scheduler.load.loads import InstanceLoad, PromptFacts
from scheduler.load.path_costs import Expected, first_token_s
from scheduler.load.prefixes import Chain
from scheduler.placement import Plan, has_room, place, why_waiting
from scheduler.registry import Registry
from wire.errors import Unavailable
from wire.types import StageTimes

_WEIGHT = 1 / 16
"""The weight of the last hand-off in the moving average."""


class Grant(AbstractContextManager["Grant"]):
    """The right to start a prompt now on these instances; exiting its context releases it.

    `prefill` is None on the local path. With an `adoption` the prompt already runs on `decode`, whose load includes it.
    """

    @classmethod
    def of_adopted(cls, adoption: Adoption) -> "Grant":
        """Return the grant to continue a stream where it is."""
        plan = Plan("adopted", None, adoption.instance.index, "it is decoded there")
        return cls(adoption.prompt.prompt_id, plan, None, adoption.instance, adoption)

    def __init__(
        self, prompt_id: str, plan: Plan, prefill: Instance | None, decode: Instance, adoption: Adoption | None = None
    ) -> None:
        self.plan = plan
        self.adoption = adoption
        self.prefill = prefill
        self.decode = decode
        self._prompt_id = prompt_id
        self._released = False

    def book(self, facts: PromptFacts) -> None:
        """Book the prompt's tokens where it is prefilled and its blocks where it is decoded."""
        for instance in (self.prefill, self.decode):
            if instance is not None:
                instance.in_flight.register(self._prompt_id, facts.chain)
        if self.prefill is None:
            self.decode.in_flight.assign_prefill(self._prompt_id, facts.num_tokens, has_images=facts.has_images)
        else:
            self.prefill.in_flight.assign_hand_off(self._prompt_id, facts, self.decode.index)
        blocks = -(-facts.num_tokens // self.decode.description.block_size)
        self.decode.in_flight.book_blocks(self._prompt_id, blocks, facts.num_sequences)

    def finished(self, chains: Iterable[Chain]) -> None:
        """Record the prompt's success; `chains` include its outputs."""
        if self.decode.description.reuse_decoded:
            self.decode.in_flight.finished(self._prompt_id, chains)

    def release(self) -> None:
        """Drop the bookings. Idempotent."""
        if self._released:
            return
        self._released = True
        (self.prefill or self.decode).in_flight.drop(self._prompt_id)
        self.decode.in_flight.drop(self._prompt_id)

    def __exit__(self, *exc: object) -> None:
        """Release."""
        self.release()


class Placer:
    """Places prompts on the registry's living instances. Implements scheduler.admission.GrantSource."""

    def __init__(self, registry: Registry, *, compares: bool = False) -> None:
        """`compares`: place a prompt on the path that costs least (load/path_costs.py), else always hand it off."""
        self._registry = registry
        self._compares = compares
        self._hand_off_s = 0.0
        self._seen: list[InstanceLoad] | None = None
        self.num_prompts = self.num_tokens = 0  # prompts placed, and their tokens that no prefix cache had

    def refresh(self) -> None:
        """Drop the cached loads, which may have changed. Until the next call, one lookup serves all waiting prompts."""
        self._seen = None

    def first_token_s(self, waiting: int, num_tokens: int) -> Expected:
        """Return when a prompt of `num_tokens`, behind `waiting` tokens, is expected to have its first token."""
        return first_token_s(self._current_loads(), waiting, num_tokens, everywhere=self._compares)

    def has_room(self, *, prefill_only: bool) -> bool:
        """Return whether some prompt may find room; `prefill_only`: even if only one that finishes at its prefill."""
        return has_room(self._current_loads(), prefill_only=prefill_only, alone=self._compares)

    def try_place(self, prompt_id: str, facts: PromptFacts) -> Grant | None:
        """Book and return a grant, or None when the prompt has to wait. Raises Unavailable or NeverFits."""
        facts = self._with_prefixes(facts)
        plan = self._place(facts)
        if plan is None:
            return None
        grant = self.grant(prompt_id, plan)
        grant.book(facts)
        self.num_prompts += 1
        self.num_tokens += facts.num_tokens - facts.known.get(plan.decode if plan.prefill is None else plan.prefill, 0)
        self.refresh()
        return grant

    def _place(self, facts: PromptFacts) -> Plan | None:
        try:
            return place(self._current_loads(), facts, self._hand_off_s, self._registry.rng)
        except Unavailable:
            if self._registry.awaits_path():
                return None
            raise self._registry.no_path() from None

    def note_times(self, times: StageTimes) -> None:
        """Learn from a served prompt what a hand-off takes in addition to computing."""
        if times.reserve_s is not None and times.send_s is not None:
            self._hand_off_s += _WEIGHT * (times.reserve_s + times.send_s - self._hand_off_s)

    def why_waiting(self, facts: PromptFacts) -> str:
        """Return why no pair can take the prompt now."""
        return why_waiting(self._registry.loads(), self._with_prefixes(facts))

    def grant(self, prompt_id: str, plan: Plan) -> Grant:
        """Return a grant of exactly this plan, without bookings. Raises InstanceLost."""
        prefill = None if plan.prefill is None else self._registry.instance(plan.prefill)
        return Grant(prompt_id, plan, prefill, self._registry.instance(plan.decode))

    def _current_loads(self) -> list[InstanceLoad]:
        if self._seen is None:
            self._seen = self._registry.loads()
        return self._seen

    def _with_prefixes(self, facts: PromptFacts) -> PromptFacts:
        """Return the facts with each instance's cached and shared tokens of the prompt."""
        if not facts.chain:
            return facts
        known, shared = dict[int, int](), dict[int, int]()
        for instance in self._registry.living():
            if not instance.in_flight.may_have(facts.chain):
                continue
            if held := instance.in_flight.tokens_known(facts.chain):
                known[instance.index] = held
            if held := instance.in_flight.tokens_shared(facts.chain):
                shared[instance.index] = held
        return replace(facts, known=known, shared=shared) if known or shared else facts
