"""The system's message for a network error, without the library's wrapping."""

import os
import socket


def system_message(error: BaseException) -> str:
    """Return the message for an unknown name or an error number, else the type of the error."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "unknown host name"
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else type(error).__name__
