"""The port of several schedulers on this machine: the supervisor opens it, and each scheduler inherits the socket.

The port therefore stays open while a scheduler restarts: another scheduler accepts the clients that connect meanwhile.
"""

import socket
from collections.abc import Mapping, Sequence

from pdserve.up_request import UpRequest
from scheduler.http.listener import SHARED_VARIABLE, listen


class SharedPort:
    """Owner of the listening socket; a single scheduler opens its port itself."""

    def __init__(self, request: UpRequest) -> None:
        """Raises ConfigError for a port that is in use."""
        self._socket: socket.socket | None = None
        if request.options.schedulers > 1:
            self._socket = listen(request.engine.host, request.engine.port)

    @property
    def is_open(self) -> bool:
        """Whether schedulers share a port."""
        return self._socket is not None

    @property
    def descriptors(self) -> Sequence[int]:
        """The descriptors that a scheduler inherits."""
        return () if self._socket is None else (self._socket.fileno(),)

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variable that gives the descriptor to a scheduler."""
        return {} if self._socket is None else {SHARED_VARIABLE: str(self._socket.fileno())}

    def close(self) -> None:
        """Close the socket here: no clients are accepted once the schedulers stop too. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
