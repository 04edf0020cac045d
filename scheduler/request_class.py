"""Request classes: named limits on the time to the first token and between tokens. Each API key may use some. Pure."""

import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from wire.cheap_dataclass import cheap_dataclass
from wire.errors import ConfigError, InvalidRequest

CLASS_HEADER = b"x-pdserve-class"
_LIMITS = ("ttft", "gap")


@cheap_dataclass(frozen=True, slots=True)
class RequestClass:
    """The most seconds to a request's first token and between two of its tokens; None: the cluster's own limit."""

    name: str = ""
    ttft_limit_s: float | None = None
    gap_limit_s: float | None = None


UNCLASSED = RequestClass()
"""The class of requests that name none and whose key has none."""


@functools.cache
def parse_classes(texts: tuple[str, ...]) -> Mapping[str, RequestClass]:
    """Return the classes of texts such as `interactive:ttft=2:gap=0.05`, by name. Raises ConfigError."""
    classes = dict[str, RequestClass]()
    for text in texts:
        name, *limits = text.split(":")
        if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum()) or name in classes:
            why = "named twice" if name in classes else "not a name of letters, digits, - and _"
            raise ConfigError(f"--request-classes {text!r}: {name!r} is {why}")
        pairs = [limit.partition("=") for limit in limits]
        given = {key: _seconds(text, key, value) for key, _, value in pairs}
        if not given or len(given) < len(pairs):
            raise ConfigError(f"--request-classes {text!r} is not NAME with ttft or gap, such as batch:ttft=60:gap=1")
        classes[name] = RequestClass(name, given.get("ttft"), given.get("gap"))
    return MappingProxyType(classes)


def _seconds(text: str, key: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if key not in _LIMITS or not 0 < seconds <= 3600:
        wanted = "a number of seconds above 0 and up to 3600" if key in _LIMITS else "ttft or gap"
        raise ConfigError(f"--request-classes {text!r}: {key}={value} is not {wanted}")
    return seconds


def class_named(name: str | None, classes: Mapping[str, RequestClass], allowed: Sequence[str]) -> RequestClass:
    """Return the class that a request names, by default the first of those allowed to its key.

    Raises InvalidRequest for any other, whether it exists or not.
    """
    if name is None:
        return classes[allowed[0]] if allowed else UNCLASSED
    if name not in allowed:
        may_use = f"this API key may use {', '.join(allowed)}" if allowed else "this API key may use none"
        raise InvalidRequest(f"X-Pdserve-Class {name[:40]!r}: {may_use}", CLASS_HEADER.decode())
    return classes[name]
