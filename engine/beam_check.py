"""Check that the beams given with a prompt can be those of a running search. Pure."""

import math

from wire.errors import InvalidRequest
from wire.types import PromptState


def check_beams(state: PromptState, *, max_model_len: int) -> None:
    """Raise InvalidRequest, with the value and the limit, for beams from which no search can continue."""
    params, beams = state.params, state.beams
    if not beams:
        return
    if params.beam_search is None:
        raise InvalidRequest(f"beams are given ({len(beams)}), but the prompt has no beam search", "beams")
    live, done = ([beam for beam in beams if beam.done is ended] for ended in (False, True))
    width, limit = params.num_beams, min(params.max_tokens, max_model_len - len(state.token_ids))
    if not live:
        raise InvalidRequest("every beam has finished already: there is nothing to generate", "beams")
    if len(live) > width or len(done) > width:
        raise InvalidRequest(
            f"{len(live)} live and {len(done)} finished beams are given, but the width is {width}", "beams"
        )
    lengths = {len(beam.token_ids) for beam in live}
    if len(lengths) > 1 or not 1 <= max(lengths) < limit:
        raise InvalidRequest(
            f"live beams have {sorted(lengths)} tokens, but must share one length, at least 1 and below the limit of "
            f"{limit}",
            "beams",
        )
    ends = sorted({len(beam.token_ids) for beam in done})
    if not all(1 <= length <= limit for length in ends):
        raise InvalidRequest(f"finished beams have {ends} tokens, but must have from 1 to {limit}", "beams")
    scores = sorted((beam.score for beam in live), reverse=True)
    with_logprobs = params.logprobs is not None
    if any(len(beam.logprobs) != len(beam.token_ids) * with_logprobs for beam in beams):
        raise InvalidRequest(
            "each token of a beam must have log probabilities if they are requested, and none otherwise", "beams"
        )
    if not all(math.isfinite(beam.score) for beam in beams) or scores != [beam.score for beam in live]:
        raise InvalidRequest("scores of beams must be finite, and live beams sorted by score, highest first", "beams")
