"""Commands and events <-> protobuf, both ways."""

from enum import StrEnum
from typing import TypeVar

from wire import cluster_pb2 as pb
from wire.convert import (
    ENDPOINT,
    LINK,
    TIMES,
    load_from_pb,
    load_to_pb,
    prompt_from_pb,
    prompt_to_pb,
    role_from_pb,
    ticket_from_pb,
    ticket_to_pb,
    token_from_pb,
    token_to_pb,
)
from wire.convert_params import prompt_logprobs_from_pb, prompt_logprobs_to_pb
from wire.errors import InternalError, InvalidRequest
from wire.messages import (
    Adopt,
    Adopted,
    Cancel,
    Claimed,
    ClaimRun,
    ClaimState,
    Command,
    EndClaim,
    Event,
    Failed,
    FetchAndGenerate,
    Generate,
    HandedOff,
    Heartbeat,
    LinkMeasured,
    MeasureLink,
    OpenSession,
    Pooled,
    Prefill,
    PrefillAndHold,
    PrefillBegun,
    PrefillHeld,
    Refused,
    Reserve,
    Reserved,
    RoleHeld,
    RunEnd,
    SessionOpen,
    SetRole,
    Step,
    TableRead,
)
from wire.plain_message import PlainMessage

_E = TypeVar("_E", bound=StrEnum)
_ADOPT = PlainMessage(Adopt, pb.Adopt)
_CANCEL = PlainMessage(Cancel, pb.Cancel)
_CLAIM = PlainMessage(ClaimRun, pb.ClaimRun)
_CLAIMED = PlainMessage(Claimed, pb.Claimed)
_END_CLAIM = PlainMessage(EndClaim, pb.EndClaim)
_HELLO = PlainMessage(OpenSession, pb.OpenSession)


def command_to_pb(command: Command) -> pb.CommandMessage:
    """Convert a command."""
    match command:
        case OpenSession():
            return pb.CommandMessage(open=_HELLO.to_pb(command))
        case Reserve():
            return pb.CommandMessage(reserve=pb.Reserve(prompt=prompt_to_pb(command.prompt)))
        case Prefill():
            prefill = pb.Prefill(
                prompt=prompt_to_pb(command.prompt, announces_files=True), ticket=ticket_to_pb(command.ticket)
            )
            return pb.CommandMessage(prefill=prefill)
        case Generate():
            return pb.CommandMessage(generate=pb.Generate(prompt=prompt_to_pb(command.prompt, announces_files=True)))
        case Cancel():
            return pb.CommandMessage(cancel=_CANCEL.to_pb(command))
        case Adopt():
            return pb.CommandMessage(adopt=_ADOPT.to_pb(command))
        case ClaimRun():
            return pb.CommandMessage(claim=_CLAIM.to_pb(command))
        case EndClaim():
            return pb.CommandMessage(end_claim=_END_CLAIM.to_pb(command, end=command.end))
        case MeasureLink():
            measure = pb.MeasureLink(peer_id=command.peer_id, epoch=command.epoch, num_bytes=command.num_bytes)
            measure.endpoints.extend(ENDPOINT.to_pb(endpoint) for endpoint in command.endpoints)
            return pb.CommandMessage(measure_link=measure)
        case SetRole():
            return pb.CommandMessage(set_role=pb.SetRole(role=command.role, epoch=command.epoch))
        case Heartbeat():
            return pb.CommandMessage(heartbeat=_heartbeat_to_pb(command))
        case PrefillAndHold() | FetchAndGenerate():
            raise InternalError(f"{type(command).__name__} is only for workers of other engines")


def command_from_pb(message: pb.CommandMessage) -> Command:
    """Convert a command. Raises InvalidRequest for an invalid or unknown one."""
    match message.WhichOneof("command"):
        case "open":
            return _HELLO.from_pb(message.open)
        case "reserve":
            return Reserve(prompt_from_pb(message.reserve.prompt))
        case "prefill":
            return Prefill(prompt_from_pb(message.prefill.prompt), ticket_from_pb(message.prefill.ticket))
        case "generate":
            return Generate(prompt_from_pb(message.generate.prompt))
        case "cancel":
            return _CANCEL.from_pb(message.cancel)
        case "adopt":
            return _ADOPT.from_pb(message.adopt)
        case "claim":
            return _CLAIM.from_pb(message.claim)
        case "end_claim":
            return _END_CLAIM.from_pb(message.end_claim, end=_member(RunEnd, message.end_claim.end))
        case "measure_link":
            measure = message.measure_link
            endpoints = tuple(ENDPOINT.from_pb(endpoint) for endpoint in measure.endpoints)
            return MeasureLink(measure.peer_id, measure.epoch, endpoints, measure.num_bytes)
        case "set_role":
            return SetRole(role_from_pb(message.set_role.role), message.set_role.epoch)
        case "heartbeat":
            return _heartbeat_from_pb(message.heartbeat)
        case other:
            raise InvalidRequest(f"a command unknown to this version: {other}")


def event_to_pb(event: Event) -> pb.EventMessage:
    """Convert an event."""
    match event:
        case SessionOpen():
            opened = pb.SessionOpen(instance_id=event.instance_id, epoch=event.epoch, load=load_to_pb(event.load))
            return pb.EventMessage(session_open=opened)
        case Reserved():
            reserved = pb.Reserved(prompt_id=event.prompt_id, ticket=ticket_to_pb(event.ticket), seconds=event.seconds)
            return pb.EventMessage(reserved=reserved)
        case Refused():
            refused = pb.Refused(prompt_id=event.prompt_id, error=event.error, message=event.message, param=event.param)
            if event.load is not None:
                refused.load.CopyFrom(load_to_pb(event.load))
            return pb.EventMessage(refused=refused)
        case Step():
            load = None if event.load is None else load_to_pb(event.load)
            step = pb.Step(tokens=[token_to_pb(token) for token in event.tokens], load=load)
            step.times.extend(pb.PromptTimes(prompt_id=p, times=TIMES.to_pb(t)) for p, t in event.times)
            step.prompt_logprobs.extend(prompt_logprobs_to_pb(part) for part in event.prompt_logprobs)
            return pb.EventMessage(step=step)
        case Adopted():
            adopted = pb.Adopted(prompt_id=event.prompt_id, prompt=prompt_to_pb(event.prompt), num_sent=event.num_sent)
            return pb.EventMessage(adopted=adopted)
        case Claimed():
            return pb.EventMessage(claimed=_CLAIMED.to_pb(event, state=event.state))
        case HandedOff():
            handed = pb.HandedOff(prompt_id=event.prompt_id, times=TIMES.to_pb(event.times))
            return pb.EventMessage(handed_off=handed)
        case Pooled():
            pooled = pb.Pooled(prompt_id=event.prompt_id, values=event.values, times=TIMES.to_pb(event.times))
            return pb.EventMessage(pooled=pooled)
        case Failed():
            failed = pb.Failed(prompt_id=event.prompt_id, error=event.error, message=event.message)
            return pb.EventMessage(failed=failed)
        case LinkMeasured():
            measured = pb.LinkMeasured(peer_id=event.peer_id, error=event.error)
            if event.link is not None:
                measured.link.CopyFrom(LINK.to_pb(event.link))
            return pb.EventMessage(link_measured=measured)
        case RoleHeld():
            held = pb.RoleHeld(role=event.role, epoch=event.epoch, answers=event.answers, error=event.error)
            return pb.EventMessage(role_held=held)
        case TableRead():
            return pb.EventMessage(table_read=pb.TableRead(digest=event.digest))
        case Heartbeat():
            return pb.EventMessage(heartbeat=_heartbeat_to_pb(event))
        case PrefillHeld() | PrefillBegun():
            raise InternalError(f"{type(event).__name__} comes only from workers of other engines")


def event_from_pb(message: pb.EventMessage) -> Event:
    """Convert an event. Raises InvalidRequest for one unknown to this version."""
    match message.WhichOneof("event"):
        case "session_open":
            opened = message.session_open
            return SessionOpen(opened.instance_id, opened.epoch, load_from_pb(opened.load))
        case "reserved":
            reserved = message.reserved
            return Reserved(reserved.prompt_id, ticket_from_pb(reserved.ticket), reserved.seconds)
        case "refused":
            refused = message.refused
            load = load_from_pb(refused.load) if refused.HasField("load") else None
            return Refused(refused.prompt_id, refused.error, refused.message, load, refused.param)
        case "step":
            step = message.step
            return Step(
                tuple(map(token_from_pb, step.tokens)),
                load_from_pb(step.load) if step.HasField("load") else None,
                tuple((entry.prompt_id, TIMES.from_pb(entry.times)) for entry in step.times),
                tuple(map(prompt_logprobs_from_pb, step.prompt_logprobs)),
            )
        case "adopted":
            adoption = message.adopted
            return Adopted(adoption.prompt_id, prompt_from_pb(adoption.prompt), adoption.num_sent)
        case "claimed":
            return _CLAIMED.from_pb(message.claimed, state=_member(ClaimState, message.claimed.state))
        case "handed_off":
            return HandedOff(message.handed_off.prompt_id, TIMES.from_pb(message.handed_off.times))
        case "pooled":
            pooled = message.pooled
            return Pooled(pooled.prompt_id, tuple(pooled.values), TIMES.from_pb(pooled.times))
        case "failed":
            return Failed(message.failed.prompt_id, message.failed.error, message.failed.message)
        case "link_measured":
            measured = message.link_measured
            link = LINK.from_pb(measured.link) if measured.HasField("link") else None
            return LinkMeasured(measured.peer_id, link, measured.error)
        case "role_held":
            held = message.role_held
            return RoleHeld(role_from_pb(held.role), held.epoch, held.answers, held.error)
        case "table_read":
            return TableRead(message.table_read.digest)
        case "heartbeat":
            return _heartbeat_from_pb(message.heartbeat)
        case other:
            raise InvalidRequest(f"an event unknown to this version: {other}")


def _member(kind: type[_E], name: str) -> _E:
    try:
        return kind(name)
    except ValueError:
        raise InvalidRequest(f"{name!r:.40} is no {kind.__name__} of this version") from None


def _heartbeat_to_pb(heartbeat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat() if heartbeat.load is None else pb.Heartbeat(load=load_to_pb(heartbeat.load))


def _heartbeat_from_pb(message: pb.Heartbeat) -> Heartbeat:
    return Heartbeat(load_from_pb(message.load) if message.HasField("load") else None)
