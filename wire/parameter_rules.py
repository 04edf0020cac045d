"""The rules of sampling parameters: each field of SamplingParams and BeamSearch (wire/types.py) carries its own.

    min_p: float = parameter(0.0, Bounds(0, 1), with_beams=0, model_sets=True)

They give the bounds of HTTP bodies (scheduler/api/generation_body.py), of the Python API
(pdserve/offline/sampling_params.py) and of generation_config.json, and the checks of instances (check_prompt.py).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")

MAX_COUNT = 2**31 - 1  # tokens, and also the largest token id: the message's fields are 32 bits
MAX_LISTED_TOKENS = 300_000  # the engine also refuses ids outside the model's vocabulary
MAX_BEAM_LOGPROBS = 128  # at each position of each hypothesis, all of which are kept until the search has ended
MAX_LOGPROBS = MAX_LISTED_TOKENS  # at each position; a step over the message limit is split (instance/step_parts.py)
MAX_SCORED_TOKENS = 2**21  # over all positions of a prompt; at most five bytes each in a message
MAX_BIAS = 100.0  # added to a token's logit, in either direction
_METADATA = "parameter"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers from `minimum` to `maximum`; `above` excludes the minimum itself."""

    minimum: float
    maximum: float = math.inf
    above: bool = False

    def allow(self, value: float) -> bool:
        """Return whether the value is within the bounds; NaN never is."""
        is_above = value > self.minimum if self.above else value >= self.minimum
        return is_above and value <= self.maximum

    def __str__(self) -> str:
        """Return what a value must be: `in [0, 1]`, `1 or more`."""
        if self.maximum == math.inf:
            return f"{self.minimum} or more"
        return f"in {'(' if self.above else '['}{self.minimum}, {self.maximum}]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """The rule of one parameter.

    `client` are the bounds of a request's value, `instance` those of a value that reaches an instance; for a list, they
    are the bounds of its length. `with_beams` is the only value that beam search allows, None: any. `model_sets`:
    whether generation_config.json may change the default. `kind` and `default` are the field's type and default.
    """

    client: Bounds
    instance: Bounds
    with_beams: float | None = None
    model_sets: bool = False
    kind: Any = None
    default: Any = None


def parameter(
    default: T, client: Bounds, *, instance: Bounds | None = None, with_beams: float | None = None,
    model_sets: bool = False,
) -> T:  # fmt: skip
    """Declare a dataclass field with a default and a rule; `instance` None: as `client`."""
    return dataclasses.field(default=default, metadata=rule(client, instance or client, with_beams, model_sets))


def rule(
    client: Bounds, instance: Bounds, with_beams: float | None = None, model_sets: bool = False
) -> Mapping[str, Parameter]:
    """Return a rule as metadata of a dataclass field."""
    return {_METADATA: Parameter(client, instance, with_beams, model_sets)}


def rules_of(*kinds: type[Any]) -> Mapping[str, Parameter]:
    """Return the rules of the fields of these dataclasses, by name."""
    fields = (field for kind in kinds for field in dataclasses.fields(kind) if _METADATA in field.metadata)
    return {one.name: replace(one.metadata[_METADATA], kind=one.type, default=one.default) for one in fields}
