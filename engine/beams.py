"""The live hypotheses of one prompt's beam search as sequences that share their blocks, copy on write.

every live beam computes its last token and gets candidates --> advance (beam_search.py)
    --> each continuation forks its parent; parents without a continuation are dropped
"""

from dataclasses import dataclass, field
from itertools import repeat

from engine.beam_search import Offer, Search, advance, num_candidates, resume, winners
from engine.kv.blocks import BlockPool
from engine.prefix import PrefixChain
from engine.sequence import Sequence
from engine.step import Candidates
from wire.types import Beam, PromptState, SamplingParams


@dataclass(slots=True, eq=False)
class Beams:
    """Mutable, owned by its prompt. `sequences[i]` is live beam i; before the first step there are none.

    A search that `has_ended` has no live beams; its hypotheses are its `winners`.
    """

    params: SamplingParams
    limit: int
    search: Search
    sequences: list[Sequence]
    has_ended: bool = False
    offered: dict[int, Candidates] = field(default_factory=dict)

    @classmethod
    def of(cls, state: PromptState, chain: PrefixChain, *, max_model_len: int) -> "Beams":
        """Return the search that `state` describes, with a sequence per live beam, made from its token ids."""
        params = state.params
        limit = min(params.max_tokens, max_model_len - len(state.token_ids))
        search = resume(state.beams, params, limit=limit)
        begun = search.live if state.beams else ()
        sequences = [Sequence([*state.token_ids, *beam.token_ids], len(state.token_ids), chain) for beam in begun]
        return cls(params, limit, search, sequences, has_ended=bool(state.beams) and not begun)

    @property
    def num_candidates(self) -> int:
        """Candidates that each live beam needs."""
        return num_candidates(self.params)

    @property
    def has_begun(self) -> bool:
        """Whether the prompt's own candidates have been taken."""
        return bool(self.sequences) or self.has_ended

    @property
    def winners(self) -> tuple[Beam, ...]:
        """The hypotheses of a search that has ended, best first."""
        return winners(self.search, self.params)

    def begin(self, candidates: Candidates, stem: Sequence) -> None:
        """Take the candidates for the prompt's first token; the beams share the blocks of `stem` once it forks."""
        step = advance(self.search, [_offers(candidates)], self.params, limit=self.limit)
        self.search, self.has_ended = step.search, step.has_ended
        self.sequences = [
            Sequence([*stem.token_ids, one.token_id], stem.prompt_length, stem.chain) for one in step.kept
        ]

    def offer(self, index: int, candidates: Candidates, blocks: BlockPool) -> None:
        """Take the candidates of live beam `index`; once all beams have some, advance the search."""
        self.offered[index] = candidates
        if len(self.offered) < len(self.sequences):
            return
        offered = [_offers(self.offered[i]) for i in range(len(self.sequences))]
        self.offered = {}
        step = advance(self.search, offered, self.params, limit=self.limit)
        parents, self.search, self.has_ended = self.sequences, step.search, step.has_ended
        self.sequences = [parents[one.parent].fork(one.token_id, blocks) for one in step.kept]
        for parent in parents:
            parent.drop(blocks)


def _offers(candidates: Candidates) -> list[Offer]:
    described = candidates.described or repeat(None, len(candidates.token_ids))
    return list(zip(candidates.token_ids, candidates.scores, described, strict=True))
