"""Beam search: when a request may use it, and its parameters."""

from scheduler.api.generation_body import GenerationBody
from wire.errors import InvalidRequest
from wire.parameter_rules import MAX_BEAM_LOGPROBS
from wire.types import WITH_BEAMS, BeamSearch


def read_beam_search(body: GenerationBody) -> BeamSearch | None:
    """Return the requested beam search, None for sampling. Raises InvalidRequest naming a conflicting field.

    A field that is not given has the value that beam search needs, whatever its default is for sampling.
    """
    if not (body.early_stopping is None or isinstance(body.early_stopping, bool) or body.early_stopping == "never"):
        raise InvalidRequest(
            f'early_stopping is {repr(body.early_stopping)[:40]}, but must be true, false or "never"', "early_stopping"
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
        if given is not None and given != off:
            raise InvalidRequest(f"{name} is {given:g}, but must be {off} with use_beam_search", name)
    if not -1 < (body.num_logprobs or 0) <= MAX_BEAM_LOGPROBS:
        field = body.num_logprobs_field
        raise InvalidRequest(
            f"{field} is {body.num_logprobs}, but must be at most {MAX_BEAM_LOGPROBS} with use_beam_search", field
        )
    return BeamSearch(1.0 if body.length_penalty is None else body.length_penalty, body.early_stopping or False)


def _refuse_beam_fields(body: GenerationBody) -> None:
    if body.length_penalty not in (None, 1.0):
        raise InvalidRequest(f"length_penalty {body.length_penalty:g} needs use_beam_search: true", "length_penalty")
    if body.early_stopping:
        raise InvalidRequest(f"early_stopping {body.early_stopping!r} needs use_beam_search: true", "early_stopping")
