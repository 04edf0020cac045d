"""Cut a prompt to the length its client asked for. Pure."""

from wire.errors import InvalidRequest


def truncate_prompt(token_ids: tuple[int, ...], keep: int | None) -> tuple[int, ...]:
    """Return the last `keep` ids (truncate_prompt_tokens), all of them for None. Raises InvalidRequest below 1."""
    if keep is None:
        return token_ids
    if keep < 1:
        raise InvalidRequest(f"truncate_prompt_tokens is {keep}, must be at least 1", "truncate_prompt_tokens")
    return token_ids[-keep:]
