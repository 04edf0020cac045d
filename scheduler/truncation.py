"""Cut a prompt to the length its client asked for. Pure."""

from wire.errors import InvalidRequest

_ALL_THAT_FITS = -1


def truncate_prompt(token_ids: tuple[int, ...], keep: int | None, *, room: int) -> tuple[int, ...]:
    """Return the last `keep` ids (truncate_prompt_tokens), for -1 the last `room`, for None all of them.

    `room` is how many tokens of the model's length the output leaves. Raises InvalidRequest for 0, below -1, and for
    more than there is room for.
    """
    if keep is None:
        return token_ids
    if keep != _ALL_THAT_FITS and not 1 <= keep <= room:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {keep}, must be from 1 to {room}, or -1 for as many as fit",
            "truncate_prompt_tokens",
        )
    return token_ids[-(room if keep == _ALL_THAT_FITS else keep) :]
