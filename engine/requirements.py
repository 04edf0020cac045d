"""Decide whether an engine can ever run a prompt, and how many blocks it needs. Pure."""

from collections.abc import Iterable, Sequence

from engine.beam_check import check_beams
from engine.finish import finish_of
from engine.interface import EngineInfo
from engine.pooling.collected import check_decoder_pooling
from engine.rope_lengths import RopeLengths
from engine.sampling.logits_check import check_token_params
from wire.errors import InvalidRequest, NeverFits, PromptTooLong
from wire.types import PromptState


def blocks_needed(
    prompt_length: int, outputs_computed: Iterable[int], block_size: int, rope: RopeLengths | None = None
) -> int:
    """Return how many blocks a prompt and its sequences need; sequence i has KV of `outputs_computed[i]` output tokens.

    Full prompt blocks are shared; a sequence that writes has its own copy of a partial last block. A sequence that the
    model recomputes past a RoPE limit (`rope`) shares no blocks.
    """
    counts = list(outputs_computed)
    recomputed = [
        count for count in counts if rope is not None and rope.drops_prompt(prompt_length, prompt_length + count)
    ]
    whole = sum(-(-(prompt_length + count) // block_size) for count in recomputed)
    sharing = [count for count in counts if count not in recomputed]
    if recomputed and not sharing:
        return whole
    shared, partial = prompt_length // block_size, int(prompt_length % block_size > 0)
    own = sum(-(-(prompt_length + count) // block_size) - shared for count in sharing if count > 0)
    return whole + shared + own + (partial if not sharing or min(sharing) == 0 else 0)


def check_runnable(state: PromptState, info: EngineInfo, *, max_num_seqs: int, prompt_only: bool = False) -> None:
    """Raise PromptTooLong, NeverFits or InvalidRequest, with the value and the limit, if `state` can never run.

    `prompt_only`: only the prompt's KV has to fit (a held prompt, whose outputs are generated elsewhere).
    """
    _check_length(len(state.token_ids), info.max_model_len)
    _check_ids("prompt", state.token_ids, info.vocab_size)
    for outputs in (*state.outputs, *(beam.token_ids for beam in state.beams)):
        _check_ids("outputs", outputs, info.vocab_size)
    if state.images and not info.takes_images:
        raise InvalidRequest(f"{info.model.name} is a text model: it takes no images", "messages")
    check_token_params(state.params, info.vocab_size)
    check_decoder_pooling(state, info.pooling, info.hidden_size, info.model.name)
    if state.pooling is None and not info.generates:
        raise InvalidRequest(f"{info.model.name} has no output layer: it returns vectors, not text", "model")
    _check_sequences(state, max_num_seqs, info.max_model_len)
    _check_blocks(state, info, prompt_only)


def check_begun(state: PromptState) -> None:
    """Raise InvalidRequest if an admitted prompt lacks the first token of a sequence, or the beams of a search."""
    if state.params.beam_search is not None:
        if not state.beams:
            raise InvalidRequest("a prompt received during a beam search lacks its beams")
    elif len(state.outputs) != state.params.num_sequences or not all(state.outputs):
        count = state.params.num_sequences
        raise InvalidRequest(f"an admitted prompt lacks a first token: its number of sequences is {count}")


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens == 0:
        raise InvalidRequest("the prompt is empty: at least 1 token is needed", "prompt")
    if num_tokens >= max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, which leaves no room for output: the model's maximum length is "
            f"{max_model_len}",
            "prompt",
        )


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        return
    for bad in (min(token_ids), max(token_ids)):
        if not 0 <= bad < vocab_size:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary [0, {vocab_size})", param)


def _check_sequences(state: PromptState, max_num_seqs: int, max_model_len: int) -> None:
    params = state.params
    count, name = params.width, "n" if params.width == params.n else "best_of"
    if not 1 <= count <= max_num_seqs:
        raise InvalidRequest(f"{name} is {count}: it must be from 1 to {max_num_seqs} (max_num_seqs)", name)
    if params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {params.max_tokens}: it must be at least 1", "max_tokens")
    check_beams(state, max_model_len=max_model_len)
    if len(state.outputs) > count:
        raise InvalidRequest(f"the number of given outputs is {len(state.outputs)}, but {name} is {count}", "outputs")
    length = len(state.token_ids)
    ended = [finish_of(done, params, prompt_length=length, max_model_len=max_model_len) for done in state.outputs]
    if len(ended) == count and all(ended):
        raise InvalidRequest("every sequence has finished already: there is nothing to generate", "outputs")


def _check_blocks(state: PromptState, info: EngineInfo, prompt_only: bool) -> None:
    length, params, layout = len(state.token_ids), state.params, info.layout
    # The last token of a sequence is never computed, so it needs no slot.
    computed = 0 if prompt_only else min(params.max_tokens, info.max_model_len - length) - 1
    count = params.width
    needed = blocks_needed(length, [computed] * count, layout.block_size, info.rope)
    if needed > layout.num_blocks:
        recomputed = info.rope is not None and info.rope.drops_prompt(length, length + computed)
        why = f", each recomputed past {info.rope.short_length} tokens," if info.rope is not None and recomputed else ""
        raise NeverFits(
            f"{length} prompt tokens and {count} x {computed + 1} output tokens{why} need {needed} KV blocks of "
            f"{layout.block_size} tokens, but the whole pool has {layout.num_blocks}",
            "max_tokens",
        )
