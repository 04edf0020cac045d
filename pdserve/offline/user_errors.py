"""Shorten the tracebacks of LLM's errors: they start at the user's line, without internal frames and causes.

Errors that are not about the call, such as those inside the engine, keep every frame.
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


def hide_internal_frames(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method so that errors about its call have no internal frames and no cause."""

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with _Border():
            return method(*args, **kwargs)

    return wrapper


class _Border:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and _is_about_call(error, at):
            error.__cause__, error.__suppress_context__ = None, True
            error.__traceback__ = None  # re-raising adds the caller's frames


def _is_about_call(error: BaseException, at: TracebackType | None) -> bool:
    """Return whether the error is about the call: a pdserve error, one raised here about an argument, or Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        return True
    if isinstance(error, PdserveError):
        return not isinstance(error, InternalError | InstanceLost)
    if not isinstance(error, _OF_INPUT):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(at)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith(_OWN)
