"""The instance's side of the encoding child: start it, send it image files, kill it after a timeout, start the next."""

import json
import signal
from dataclasses import dataclass
from typing import Any

from engine.vision.encoded_image import EncodedImage, EncoderLimits
from images.token_count import ImageTokens
from processes.child import ChildProcess
from processes.frames import frame, receive_frame, receive_object
from telemetry.logs import EventLogger
from wire.errors import ConfigError, DeadlineExceeded, InternalError, InvalidRequest, Unavailable

_log = EventLogger("images")
_MODULE = "engine.vision.child"
_STDERR_BYTES = 2000
_HEADER_BYTES = 64 * 1024
_VALUES_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class TowerSettings:
    """Which tower runs where: the model's folder, the engine's dtype, the name of a device, CPU threads."""

    folder: str
    dtype: str
    device: str
    num_threads: int = 1


class _Lost(Exception):
    """The child exited, or was killed for taking too long."""

    def __init__(self, reason: str, *, is_crash: bool = False) -> None:
        super().__init__(reason)
        self.is_crash = is_crash


class EncodingChild:
    """Owns the child process. One thread uses it, and must outlive each child (see child.py)."""

    def __init__(self, settings: TowerSettings, limits: EncoderLimits) -> None:
        self._settings, self._limits = settings, limits
        self._process: ChildProcess | None = None
        self.tower_bytes = 0

    @property
    def pid(self) -> int | None:
        """The process id of the child, None where there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a child where there is none, and wait until its tower is loaded. Raises ConfigError, Unavailable."""
        if self._process is not None:
            return
        self._process = ChildProcess(_MODULE, is_silent=True, keeps_stderr=True)
        settings, limits = self._settings, self._limits
        hello = {
            "folder": settings.folder, "dtype": settings.dtype, "device": settings.device,
            "num_threads": settings.num_threads, "memory_bytes": limits.memory_bytes,
        }  # fmt: skip
        try:
            answer = self._exchange(frame(json.dumps(hello).encode()), limits.start_s, "loading the vision tower")
        except _Lost as error:
            raise Unavailable(f"the image encoder failed to start: {error}") from error
        if "refused" in answer:
            self.close()
            raise ConfigError(str(answer["refused"]))
        self.tower_bytes = int(answer["bytes"])

    def encode(self, data: bytes) -> EncodedImage:
        """Return the embeddings of an image file; it is sent again, once, if the child is lost meanwhile.

        Raises InvalidRequest if the file cannot be decoded or the second child crashes too, DeadlineExceeded if the
        second child takes too long, InternalError for a defect, and Unavailable if no child starts.
        """
        try:
            return self._encode_once(data)
        except _Lost as lost:
            _log.warning("image_encoder_lost", reason=str(lost))
        try:
            return self._encode_once(data)
        except _Lost as lost:
            message = f"the image was given up after two tries: {lost}"
            raise InvalidRequest(message) if lost.is_crash else DeadlineExceeded(message) from lost

    def close(self) -> None:
        """End the child. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _encode_once(self, data: bytes) -> EncodedImage:
        self.start()
        answer = self._exchange(frame(data), self._limits.encode_s, "encoding the image")
        if "refused" in answer:
            raise InvalidRequest(str(answer["refused"]))
        if "failed" in answer:
            raise InternalError(f"encoding the image failed: {answer['failed']}")
        values = self._receive_values()
        time, height, width = answer["grid"]
        return EncodedImage(ImageTokens(int(answer["count"]), (time, height, width)), values)

    def _exchange(self, message: bytes, timeout_s: float, what: str) -> dict[str, Any]:
        """Send a message and return the header of its answer. Raises _Lost after it has killed the child."""
        assert self._process is not None
        connection = self._process.connection
        connection.settimeout(timeout_s)
        try:
            connection.sendall(message)
            answer = receive_object(connection, _HEADER_BYTES)
        except TimeoutError:
            self.close()
            raise _Lost(f"{what} took longer than the limit of {timeout_s:g} s") from None
        except ConnectionError:
            answer = None
        if answer is None:
            raise self._exit_reason()
        return answer

    def _receive_values(self) -> bytes:
        assert self._process is not None
        try:
            values = receive_frame(self._process.connection, _VALUES_BYTES)
        except (TimeoutError, ConnectionError):
            values = None
        if values is None:
            raise self._exit_reason()
        return values

    def _exit_reason(self) -> _Lost:
        """End a child that does not answer any more, and return the error to raise."""
        assert self._process is not None
        process, self._process = self._process, None
        try:
            code = process.wait()
            stderr = process.stderr_tail(_STDERR_BYTES).decode(errors="replace").strip()
        except TimeoutError:
            return _Lost("the encoder closed its connection")
        finally:
            process.close()
        name = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        return _Lost(f"the encoder ended ({name}) {stderr}".strip(), is_crash=-code != signal.SIGKILL)
