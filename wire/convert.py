"""Plain data <-> protobuf, both ways. Malformed input raises InvalidRequest only."""

from dataclasses import fields
from enum import StrEnum
from operator import attrgetter
from typing import TypeVar

from google.protobuf.message import DecodeError

from wire import cluster_pb2 as pb
from wire.check_prompt import check_prompt
from wire.convert_params import (
    beam_from_pb,
    beam_to_pb,
    logprobs_from_pb,
    logprobs_to_pb,
    params_from_pb,
    params_to_pb,
    pooling_from_pb,
    pooling_to_pb,
)
from wire.errors import InvalidRequest
from wire.kv_layout import KvTensor
from wire.types import (
    FinishReason,
    InstanceDescription,
    KvEndpoint,
    LinkStatus,
    LoadSnapshot,
    ModelIdentity,
    PromptState,
    Role,
    StageTimes,
    Ticket,
    TokenOutput,
)

E = TypeVar("E", bound=StrEnum)
MAX_DESCRIPTION_BYTES = 16 * 2**20


def prompt_to_pb(state: PromptState) -> pb.PromptState:
    """Convert a prompt and its outputs so far."""
    return pb.PromptState(
        prompt_id=state.prompt_id,
        request_id=state.request_id,
        token_ids=state.token_ids,
        params=params_to_pb(state.params),
        outputs=[pb.Output(token_ids=output) for output in state.outputs],
        probe=state.probe,
        cache_salt=state.cache_salt,
        beams=[beam_to_pb(beam) for beam in state.beams],
        pooling=None if state.pooling is None else pooling_to_pb(state.pooling),
    )


def prompt_from_pb(message: pb.PromptState) -> PromptState:
    """Convert a prompt and check it."""
    state = PromptState(
        prompt_id=message.prompt_id,
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        params=params_from_pb(message.params),
        outputs=tuple(tuple(output.token_ids) for output in message.outputs),
        probe=message.probe,
        cache_salt=message.cache_salt,
        beams=tuple(beam_from_pb(beam) for beam in message.beams),
        pooling=pooling_from_pb(message.pooling) if message.HasField("pooling") else None,
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
        raise InvalidRequest(f"a description that is not a PromptState: {error}") from error
    return prompt_from_pb(message)


def ticket_to_pb(ticket: Ticket) -> pb.Ticket:
    """Convert a ticket."""
    return pb.Ticket(
        ticket_id=ticket.ticket_id,
        epoch=ticket.epoch,
        instance_id=ticket.instance_id,
        num_tokens=ticket.num_tokens,
        first_token=ticket.first_token,
        lease_s=ticket.lease_s,
        endpoints=[endpoint_to_pb(endpoint) for endpoint in ticket.endpoints],
    )


def ticket_from_pb(message: pb.Ticket) -> Ticket:
    """Convert a ticket."""
    return Ticket(
        ticket_id=message.ticket_id,
        epoch=message.epoch,
        instance_id=message.instance_id,
        num_tokens=message.num_tokens,
        first_token=message.first_token,
        lease_s=message.lease_s,
        endpoints=tuple(endpoint_from_pb(endpoint) for endpoint in message.endpoints),
    )


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
    return TokenOutput(
        prompt_id=message.prompt_id,
        sequence=message.sequence,
        index=message.index,
        token_id=message.token_id if message.HasField("token_id") else None,
        finish=_known(FinishReason, message.finish) if message.finish else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        logprobs=logprobs_from_pb(message.logprobs) if message.HasField("logprobs") else None,
    )


def times_to_pb(times: StageTimes) -> pb.StageTimes:
    """Convert stage times."""
    return pb.StageTimes(
        queue_s=times.queue_s,
        reserve_s=times.reserve_s,
        prefill_s=times.prefill_s,
        send_s=times.send_s,
        first_step_s=times.first_step_s,
        kv_bytes=times.kv_bytes,
        transport=times.transport,
        kv_bytes_early=times.kv_bytes_early,
        cached_tokens=times.cached_tokens,
        num_swaps=times.num_swaps,
        num_rebuilds=times.num_rebuilds,
    )


def times_from_pb(message: pb.StageTimes) -> StageTimes:
    """Convert stage times."""
    return StageTimes(
        queue_s=message.queue_s if message.HasField("queue_s") else None,
        reserve_s=message.reserve_s if message.HasField("reserve_s") else None,
        prefill_s=message.prefill_s if message.HasField("prefill_s") else None,
        send_s=message.send_s if message.HasField("send_s") else None,
        first_step_s=message.first_step_s if message.HasField("first_step_s") else None,
        kv_bytes=message.kv_bytes,
        transport=message.transport,
        kv_bytes_early=message.kv_bytes_early,
        cached_tokens=message.cached_tokens,
        num_swaps=message.num_swaps,
        num_rebuilds=message.num_rebuilds,
    )


_LOAD_FIELDS = tuple(field.name for field in fields(LoadSnapshot) if field.type in (int, float))
_load_values = attrgetter(*_LOAD_FIELDS)  # in LoadSnapshot's field order; used at every step
_LINK_FIELDS = tuple(field.name for field in fields(LinkStatus) if field.type in (int, float, str))


def load_to_pb(load: LoadSnapshot) -> pb.LoadSnapshot:
    """Convert a load snapshot."""
    message = pb.LoadSnapshot(**{name: getattr(load, name) for name in _LOAD_FIELDS})
    message.step_tokens.extend(load.step_tokens)
    message.links.extend(link_to_pb(link) for link in load.links)
    return message


def load_from_pb(message: pb.LoadSnapshot) -> LoadSnapshot:
    """Convert a load snapshot."""
    values = [*_load_values(message), tuple(message.step_tokens), tuple(map(link_from_pb, message.links))]
    return LoadSnapshot(*values)


def link_to_pb(link: LinkStatus) -> pb.LinkStatus:
    """Convert a link's status."""
    return pb.LinkStatus(**{name: getattr(link, name) for name in _LINK_FIELDS}, passed_over=link.passed_over)


def link_from_pb(message: pb.LinkStatus) -> LinkStatus:
    """Convert a link's status."""
    values = {name: getattr(message, name) for name in _LINK_FIELDS}
    return LinkStatus(**values, passed_over=tuple(message.passed_over))


_DESCRIPTION_FIELDS = (
    "instance_id", "epoch", "server_ip", "device_ids", "host", "port", "pid", "role", "table_digest",
    "protocol_version", "max_model_len", "vocab_size", "dtype", "block_size", "num_blocks", "prefill_chunk_size",
    "max_num_seqs", "device", "kv_digests", "kv_transports",
)  # fmt: skip


def description_to_pb(description: InstanceDescription) -> pb.InstanceDescription:
    """Convert a description."""
    message = pb.InstanceDescription(**{name: getattr(description, name) for name in _DESCRIPTION_FIELDS})
    message.model_name = description.model.name
    message.weights_digest = description.model.weights_digest
    message.tokenizer_digest = description.model.tokenizer_digest
    message.kv_tensors.extend(
        pb.KvTensor(layer=t.layer, name=t.name, heads=t.heads, head_dim=t.head_dim, dtype=t.dtype)
        for t in description.kv_tensors
    )
    message.endpoints.extend(endpoint_to_pb(endpoint) for endpoint in description.endpoints)
    return message


def description_from_pb(message: pb.InstanceDescription) -> InstanceDescription:
    """Convert a description."""
    values = {name: getattr(message, name) for name in _DESCRIPTION_FIELDS}
    values |= {"role": _known(Role, message.role)}
    values |= {"device_ids": tuple(message.device_ids), "kv_transports": tuple(message.kv_transports)}
    return InstanceDescription(
        **values,
        model=ModelIdentity(message.model_name, message.weights_digest, message.tokenizer_digest),
        kv_tensors=tuple(KvTensor(t.layer, t.name, t.heads, t.head_dim, t.dtype) for t in message.kv_tensors),
        endpoints=tuple(endpoint_from_pb(endpoint) for endpoint in message.endpoints),
    )


def _known(kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequest(f"a {kind.__name__} unknown to this version: {value[:40]!r}") from None


def endpoint_to_pb(endpoint: KvEndpoint) -> pb.KvEndpoint:
    """Convert an endpoint."""
    return pb.KvEndpoint(
        transport=endpoint.transport, address=endpoint.address, host_id=endpoint.host_id, rank=endpoint.rank
    )


def endpoint_from_pb(message: pb.KvEndpoint) -> KvEndpoint:
    """Convert an endpoint."""
    return KvEndpoint(transport=message.transport, address=message.address, host_id=message.host_id, rank=message.rank)
