"""Errors of LLM as its user reads them: from the line that called it, without the frames of ours and what caused them.

What is no answer to the caller, an error inside the engine say, keeps every frame.
"""

import functools
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from wire.errors import InstanceLost, InternalError, PdserveError

P = ParamSpec("P")
R = TypeVar("R")
_OWN = "pdserve.offline."
_OF_INPUT = (ValueError, TypeError, NotImplementedError)


def plainly(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method whose errors that are an answer to its caller have no frame of ours, and no cause."""

    @functools.wraps(method)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        with _Border():
            return method(*args, **kwargs)

    return told


class _Border:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and _is_answer(error, at):
            error.__cause__, error.__suppress_context__ = None, True
            error.__traceback__ = None  # what is raised on gets the frames of whoever called


def _is_answer(error: BaseException, at: TracebackType | None) -> bool:
    """Whether it tells the caller something: an error of ours, one raised here about what was given, or his Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        return True
    if isinstance(error, PdserveError):
        return not isinstance(error, InternalError | InstanceLost)
    if not isinstance(error, _OF_INPUT):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(at)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith(_OWN)
