"""Beam search: when a request may use it, and its parameters."""

from collections.abc import Mapping
from typing import Any

from scheduler.api.generation_body import GenerationBody
from wire.errors import InvalidRequest
from wire.types import WITH_BEAMS, BeamSearch


def read_beam_search(body: GenerationBody, defaults: Mapping[str, Any]) -> BeamSearch | None:
    """Return the requested beam search, None for sampling. Raises InvalidRequest naming a conflicting field."""
    if not (body.early_stopping is None or isinstance(body.early_stopping, bool) or body.early_stopping == "never"):
        raise InvalidRequest(
            f'early_stopping is {repr(body.early_stopping)[:40]}, must be true, false or "never"', "early_stopping"
        )
    if not body.use_beam_search:
        _refuse_beam_fields(body)
        return None
    width = body.best_of or body.n or 1
    if width < 2:
        raise InvalidRequest(
            f"use_beam_search needs at least 2 beams: n is {body.n or 1} and best_of {body.best_of or 'not given'}", "n"
        )
    for name, off in WITH_BEAMS.items():
        given = getattr(body, name)
        value = defaults.get(name, off) if given is None else given
        if value != off:
            default = " (the default)" if given is None else ""
            raise InvalidRequest(f"{name} is {value:g}{default}, must be {off} with use_beam_search", name)
    _refuse_neighbours(body)
    return BeamSearch(1.0 if body.length_penalty is None else body.length_penalty, body.early_stopping or False)


def _refuse_beam_fields(body: GenerationBody) -> None:
    if body.length_penalty not in (None, 1.0):
        raise InvalidRequest(f"length_penalty {body.length_penalty:g} needs use_beam_search: true", "length_penalty")
    if body.early_stopping:
        raise InvalidRequest(f"early_stopping {body.early_stopping!r} needs use_beam_search: true", "early_stopping")


def _refuse_neighbours(body: GenerationBody) -> None:
    """Refuse logprobs: log probabilities of single tokens have no meaning for a hypothesis."""
    if body.num_logprobs is not None:
        raise InvalidRequest("logprobs are not available with use_beam_search", "logprobs")
