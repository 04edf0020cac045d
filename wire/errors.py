"""The error tree of pdserve, and how each leaf maps to gRPC and HTTP.

PdserveError
├── InvalidRequest          the caller's input is wrong               400  INVALID_ARGUMENT
│   ├── PromptTooLong       prompt (+ output) exceeds the model       400
│   ├── InvalidGrammar      unsupported or invalid output grammar     400
│   ├── NeverFits           more KV than the whole pool can hold      400
│   └── NotInstalled        this server lacks a needed package        501  UNIMPLEMENTED
├── UnknownModel            no such model is served                   404  NOT_FOUND
├── UnknownStream           no such stream can be resumed             404  NOT_FOUND
├── StreamMoved             another scheduler owns the stream now     409  ABORTED
├── Overloaded              the queue is full; come back later        429  RESOURCE_EXHAUSTED
├── NoCapacity              no free blocks now; the caller may wait   503  RESOURCE_EXHAUSTED
├── Unavailable             nothing can serve this now                503  UNAVAILABLE
│   ├── InstanceLost        an instance died or stopped responding    503
│   ├── Loading             an instance is still loading its model    503
│   └── Draining            this process is shutting down             503
├── HandoffFailed           the KV did not arrive completely          500  ABORTED
├── OutputDiffers           a repeated generation is not the same     500  ABORTED
├── DeadlineExceeded        a wait exceeded its deadline              504  DEADLINE_EXCEEDED
├── Cancelled               the caller disconnected                   499  CANCELLED
├── Incompatible            two processes do not belong together      500  FAILED_PRECONDITION
├── ConfigError             flags, env or files are wrong (exit 2)    500  FAILED_PRECONDITION
└── InternalError           a bug in pdserve                          500  INTERNAL
"""

from dataclasses import dataclass


class PdserveError(Exception):
    """Base of every error that pdserve raises on purpose; its message may be shown to the user."""


class InvalidRequest(PdserveError):
    """The caller's input is wrong; `param` names the field by its JSON path."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """Prompt plus output exceeds the model's length."""


class InvalidGrammar(InvalidRequest):
    """The requested structured output is invalid, unsupported, or costs more than the limit in the message."""


class NeverFits(InvalidRequest):
    """The request needs more KV blocks than the whole pool has."""


class NotInstalled(InvalidRequest):
    """The request is valid, but this server lacks a package that it needs."""


class UnknownModel(PdserveError):
    """No such model is served here."""


class UnknownStream(PdserveError):
    """No instance keeps a stream with this id for this API key."""


class StreamMoved(PdserveError):
    """Another scheduler owns the stream now: this one must not continue it."""


class Overloaded(PdserveError):
    """No request like this is accepted now; retry after `retry_after_s`, unless `is_final`: then a retry cannot help.

    `limit` names the queue limit that the request would exceed, empty for other reasons.
    """

    def __init__(self, message: str, retry_after_s: int = 1, *, is_final: bool = False, limit: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_final = is_final
        self.limit = limit


class NoCapacity(PdserveError):
    """No free blocks now; the caller may wait and retry."""


class Unavailable(PdserveError):
    """Nothing can serve this now."""


class InstanceLost(Unavailable):
    """An instance died or stopped responding."""


class Loading(Unavailable):
    """An instance is reachable but still loading its model."""


class Draining(Unavailable):
    """This process is shutting down."""


class HandoffFailed(PdserveError):
    """The KV of a prompt did not arrive completely."""


class OutputDiffers(PdserveError):
    """A sequence that was generated again differs from what the client has of it."""


class DeadlineExceeded(PdserveError):
    """A wait exceeded its deadline."""


class Cancelled(PdserveError):
    """The caller disconnected or cancelled."""


class Incompatible(PdserveError):
    """Two processes do not belong together; the message carries both values."""


class ConfigError(PdserveError):
    """Flags, environment or files are wrong; the process exits with status 2."""


class InternalError(PdserveError):
    """A bug in pdserve; details are in the log."""


@dataclass(frozen=True, slots=True)
class Appearance:
    """What an error class maps to: gRPC status name, HTTP status, OpenAI error type."""

    grpc_status: str
    http_status: int
    openai_type: str


_APPEARANCE: dict[type[PdserveError], Appearance] = {
    InvalidRequest: Appearance("INVALID_ARGUMENT", 400, "invalid_request_error"),
    NotInstalled: Appearance("UNIMPLEMENTED", 501, "not_implemented_error"),
    UnknownModel: Appearance("NOT_FOUND", 404, "not_found_error"),
    UnknownStream: Appearance("NOT_FOUND", 404, "not_found_error"),
    StreamMoved: Appearance("ABORTED", 409, "conflict_error"),
    Overloaded: Appearance("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    NoCapacity: Appearance("RESOURCE_EXHAUSTED", 503, "service_unavailable_error"),
    Unavailable: Appearance("UNAVAILABLE", 503, "service_unavailable_error"),
    HandoffFailed: Appearance("ABORTED", 500, "internal_server_error"),
    OutputDiffers: Appearance("ABORTED", 500, "internal_server_error"),
    DeadlineExceeded: Appearance("DEADLINE_EXCEEDED", 504, "timeout_error"),
    Cancelled: Appearance("CANCELLED", 499, "request_cancelled"),
    Incompatible: Appearance("FAILED_PRECONDITION", 500, "internal_server_error"),
    ConfigError: Appearance("FAILED_PRECONDITION", 500, "internal_server_error"),
    InternalError: Appearance("INTERNAL", 500, "internal_server_error"),
}


def appearance(error: BaseException) -> Appearance:
    """Return the external form of `error`: its own entry or the nearest ancestor's, else InternalError's."""
    for cls in type(error).__mro__:
        if cls in _APPEARANCE:
            return _APPEARANCE[cls]
    return _APPEARANCE[InternalError]


_BY_NAME: dict[str, type[PdserveError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest, PromptTooLong, InvalidGrammar, NeverFits, NotInstalled, UnknownModel, UnknownStream,
        StreamMoved, Overloaded, NoCapacity, Unavailable, InstanceLost, Loading, Draining, HandoffFailed, OutputDiffers,
        DeadlineExceeded, Cancelled, Incompatible, ConfigError, InternalError,
    )
}  # fmt: skip


def to_name(error: BaseException) -> str:
    """Return the leaf name sent over the wire; InternalError for an exception outside this tree."""
    name = type(error).__name__
    return name if name in _BY_NAME else InternalError.__name__


def from_name(name: str, message: str, param: str = "") -> PdserveError:
    """Rebuild an error from its name and message on the wire; unknown names become InternalError.

    `param` is the field that an InvalidRequest names.
    """
    error = _BY_NAME.get(name, InternalError)(message)
    if isinstance(error, InvalidRequest):
        error.param = param or None
    return error
