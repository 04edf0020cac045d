"""What the system says of an error of the network, without what a library wraps around it."""

import os
import socket


def system_words(error: BaseException) -> str:
    """Return the words for a name that is not known or for an error number, else the kind of the error."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "the name is not known"
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else type(error).__name__
