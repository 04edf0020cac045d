"""Truncate a prompt to the requested length. Pure."""

from wire.errors import InvalidRequest

_ALL_THAT_FITS = -1


def truncate_prompt(token_ids: tuple[int, ...], keep: int | None, *, room: int, side: str = "left") -> tuple[int, ...]:
    """Return as many of the ids as `keep` (truncate_prompt_tokens) says: -1 is as many as fit (`room`), None is all.

    `side` is the side that is cut: left keeps the last ids, right the first. `room` is how many tokens of the model's
    maximum context length the output leaves. Raises InvalidRequest for 0, and for values below -1 or above `room`.
    """
    kept = tokens_kept(keep, room=room)
    if kept is None:
        return token_ids
    return token_ids[-kept:] if side == "left" else token_ids[:kept]


def tokens_kept(keep: int | None, *, room: int) -> int | None:
    """Return the most tokens that truncate_prompt_tokens keeps, None for all. Raises as truncate_prompt does."""
    if keep is None:
        return None
    if keep != _ALL_THAT_FITS and not 1 <= keep <= room:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {keep}, but must be from 1 to {room}, or -1 for as many as fit"
            + (". Please request a smaller truncation size." if keep > room else ""),
            "truncate_prompt_tokens",
        )
    return room if keep == _ALL_THAT_FITS else keep
