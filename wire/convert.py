"""Plain data <-> protobuf, both ways. Malformed input raises InvalidRequest only."""

from dataclasses import fields
from enum import StrEnum
from operator import attrgetter
from typing import TypeVar

from google.protobuf.message import DecodeError

from wire import cluster_pb2 as pb
from wire.check_prompt import check_prompt
from wire.convert_params import (
    POOLING,
    beam_from_pb,
    beam_to_pb,
    logprobs_from_pb,
    logprobs_to_pb,
    params_from_pb,
    params_to_pb,
)
from wire.description import InstanceDescription, ModelIdentity
from wire.errors import InvalidRequest
from wire.kv_layout import KvTensor
from wire.load import LinkStatus, LoadSnapshot
from wire.plain_message import PlainMessage
from wire.types import (
    FinishReason,
    KvEndpoint,
    PromptImage,
    PromptState,
    ResumableStream,
    Role,
    StageTimes,
    Ticket,
    TokenOutput,
)

E = TypeVar("E", bound=StrEnum)
MAX_DESCRIPTION_BYTES = 16 * 2**20
ENDPOINT = PlainMessage(KvEndpoint, pb.KvEndpoint)
LINK = PlainMessage(LinkStatus, pb.LinkStatus)
TIMES = PlainMessage(StageTimes, pb.StageTimes)
_DESCRIPTION = PlainMessage(InstanceDescription, pb.InstanceDescription)
_IMAGE = PlainMessage(PromptImage, pb.PromptImage, not_sent=("data",))
_PROMPT = PlainMessage(PromptState, pb.PromptState, not_sent=("traceparent",))
_STREAM = PlainMessage(ResumableStream, pb.ResumableStream)
_TENSOR = PlainMessage(KvTensor, pb.KvTensor)
_TICKET = PlainMessage(Ticket, pb.Ticket)


def prompt_to_pb(state: PromptState, *, announces_files: bool = False) -> pb.PromptState:
    """Convert a prompt and its outputs so far, without the files of its images (rpc/image_files.py sends them).

    `announces_files`: their sizes are included, for an instance that gets them.
    """
    return _PROMPT.to_pb(
        state,
        params=params_to_pb(state.params),
        outputs=[pb.Output(token_ids=output) for output in state.outputs],
        beams=map(beam_to_pb, state.beams),
        pooling=None if state.pooling is None else POOLING.to_pb(state.pooling),
        images=[
            _IMAGE.to_pb(image, grid=image.grid, data_bytes=len(image.data) if announces_files else 0)
            for image in state.images
        ],
        stream=None if state.stream is None else _STREAM.to_pb(state.stream),
    )


def prompt_from_pb(message: pb.PromptState) -> PromptState:
    """Convert a prompt and check it."""
    state = _PROMPT.from_pb(
        message,
        params=params_from_pb(message.params),
        outputs=tuple(tuple(output.token_ids) for output in message.outputs),
        beams=tuple(map(beam_from_pb, message.beams)),
        pooling=POOLING.from_pb(message.pooling) if message.HasField("pooling") else None,
        images=tuple(map(_image_from_pb, message.images)),
        stream=_STREAM.from_pb(message.stream) if message.HasField("stream") else None,
    )
    check_prompt(state)
    return state


def describe_prompt(state: PromptState) -> bytes:
    """Return the serialised prompt that a commit carries."""
    return prompt_to_pb(state).SerializeToString()


def read_prompt(description: bytes) -> PromptState:
    """Parse and check what `describe_prompt` returned."""
    if len(description) > MAX_DESCRIPTION_BYTES:
        raise InvalidRequest(f"a description of {len(description)} bytes exceeds {MAX_DESCRIPTION_BYTES}")
    message = pb.PromptState()
    try:
        message.ParseFromString(description)
    except DecodeError as error:
        raise InvalidRequest(f"this description is not a PromptState: {error}") from error
    return prompt_from_pb(message)


def ticket_to_pb(ticket: Ticket) -> pb.Ticket:
    """Convert a ticket."""
    return _TICKET.to_pb(ticket, endpoints=map(ENDPOINT.to_pb, ticket.endpoints))


def ticket_from_pb(message: pb.Ticket) -> Ticket:
    """Convert a ticket."""
    return _TICKET.from_pb(message, endpoints=tuple(map(ENDPOINT.from_pb, message.endpoints)))


def token_to_pb(token: TokenOutput) -> pb.TokenOutput:
    """Convert one token."""
    message = pb.TokenOutput(prompt_id=token.prompt_id, sequence=token.sequence, index=token.index)
    if token.token_id is not None:
        message.token_id = token.token_id
    if token.finish is not None:
        message.finish = token.finish
    if token.stop_token_id is not None:
        message.stop_token_id = token.stop_token_id
    if token.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_pb(token.logprobs))
    return message


def token_from_pb(message: pb.TokenOutput) -> TokenOutput:
    """Convert one token."""
    token = TokenOutput(
        message.prompt_id,
        message.sequence,
        message.index,
        message.token_id or (0 if message.HasField("token_id") else None),
    )
    if message.finish:  # the last token alone
        token.finish = _enum_value(FinishReason, message.finish)
        token.stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
    if message.HasField("logprobs"):
        token.logprobs = logprobs_from_pb(message.logprobs)
    return token


_LOAD_FIELDS = tuple(field.name for field in fields(LoadSnapshot) if field.type in (int, float))
_load_values = attrgetter(*_LOAD_FIELDS)  # in LoadSnapshot's field order; used at every step


def load_to_pb(load: LoadSnapshot) -> pb.LoadSnapshot:
    """Convert a load snapshot."""
    message = pb.LoadSnapshot(**{name: getattr(load, name) for name in _LOAD_FIELDS})
    message.step_tokens.extend(load.step_tokens)
    message.links.extend(map(LINK.to_pb, load.links))
    return message


def load_from_pb(message: pb.LoadSnapshot) -> LoadSnapshot:
    """Convert a load snapshot."""
    values = [*_load_values(message), tuple(message.step_tokens), tuple(map(LINK.from_pb, message.links))]
    return LoadSnapshot(*values)


def description_to_pb(description: InstanceDescription) -> pb.InstanceDescription:
    """Convert a description."""
    model = description.model
    return _DESCRIPTION.to_pb(
        description,
        role=description.role,
        model_name=model.name,
        weights_digest=model.weights_digest,
        tokenizer_digest=model.tokenizer_digest,
        kv_tensors=map(_TENSOR.to_pb, description.kv_tensors),
        endpoints=map(ENDPOINT.to_pb, description.endpoints),
    )


def description_from_pb(message: pb.InstanceDescription) -> InstanceDescription:
    """Convert a description."""
    return _DESCRIPTION.from_pb(
        message,
        role=role_from_pb(message.role),
        model=ModelIdentity(message.model_name, message.weights_digest, message.tokenizer_digest),
        kv_tensors=tuple(map(_TENSOR.from_pb, message.kv_tensors)),
        endpoints=tuple(map(ENDPOINT.from_pb, message.endpoints)),
    )


def role_from_pb(value: str) -> Role:
    """Convert a role. Raises InvalidRequest for one unknown to this version."""
    return _enum_value(Role, value)


def _image_from_pb(message: pb.PromptImage) -> PromptImage:
    if len(message.grid) != 3:
        raise InvalidRequest(f"the grid of an image has {len(message.grid)} numbers instead of 3", "images")
    time, height, width = message.grid
    return _IMAGE.from_pb(message, grid=(time, height, width))


def _enum_value(kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequest(f"a {kind.__name__} unknown to this version: {value[:40]!r}") from None
