"""The cluster secret over gRPC: server and client prove for every call that they hold it, over fresh nonces.

    client   Challenge(its nonce, fingerprint) ---->
             <- its nonce, its proof, fingerprint    server
    client   Describe | Session, with the three values of `_KEYS` as metadata ---->

If neither side has a secret, the proofs are empty and the server checks the client's address (security/trust.py).
"""

import secrets
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from security.nonces import NonceMint
from security.secret import MAX_NONCE_BYTES, MIN_NONCE_BYTES, Prover, Side, differ, readable
from security.trust import Trust, printable
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire import cluster_pb2 as pb
from wire.errors import Incompatible

_log = EventLogger("trust")

Metadata = tuple[tuple[str, bytes], ...]

_KEYS = ("pdserve-opener-nonce-bin", "pdserve-nonce-bin", "pdserve-proof-bin")
_PURPOSE = "grpc"
_NONCE_BYTES = 32


async def prove(stub: Any, method: str, trust: Trust, address: str, timeout_s: float) -> Metadata:
    """Return the metadata for a call of `method` at `address`, once the server has proven that it holds the secret.

    Raises Incompatible when one side lacks the secret or has another, AioRpcError when the server does not answer.
    """
    nonce, secret = secrets.token_bytes(_NONCE_BYTES), trust.secret
    request = pb.ChallengeRequest(
        nonce=nonce, host=trust.host, fingerprint="" if secret is None else secret.fingerprint
    )
    reply = await stub.Challenge(request, timeout=timeout_s)
    if secret is None and not reply.fingerprint:
        return ()
    theirs, their_host = readable(reply.fingerprint), f"{printable(reply.host)} at {address}"
    if secret is None or theirs != secret.fingerprint:
        raise Incompatible(differ(secret, trust.host, theirs, their_host))
    if not Prover(secret, _PURPOSE, nonce, reply.nonce).holds(Side.SERVER, reply.proof):
        raise Incompatible(
            f"{their_host} claims to hold the cluster secret {theirs} of this host ({trust.host}) "
            "but cannot prove that it holds it"
        )
    proof = Prover(secret, _purpose_of(method), nonce, reply.nonce).proof(Side.CLIENT)
    return tuple(zip(_KEYS, (nonce, reply.nonce, proof), strict=True))


class ProofCheck:
    """Decides which callers a server admits. Owner of its nonces: anyone may get one, but only used ones are stored."""

    def __init__(self, trust: Trust, clock: Callable[[], float] = time.monotonic) -> None:
        self._trust, self._mint = trust, NonceMint(clock)
        self._refusals = CappedLog(_log, clock=clock)
        self.refused = 0

    async def challenge(self, request: pb.ChallengeRequest, context: Any) -> pb.ChallengeReply:
        """Prove that this server holds the secret, and issue a nonce. Without a secret, check the address instead."""
        secret, host = self._trust.secret, f"{printable(request.host)} at {peer_address(context)}"
        await self._check_address(context)
        if not MIN_NONCE_BYTES <= len(request.nonce) <= MAX_NONCE_BYTES:
            message = f"the nonce has {len(request.nonce)} bytes, but must have {MIN_NONCE_BYTES} to {MAX_NONCE_BYTES}"
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "nonce", message)
        theirs = readable(request.fingerprint)
        if theirs != ("" if secret is None else secret.fingerprint):
            self._log_refusal("other_secret", differ(secret, self._trust.host, theirs, host))
        if secret is None:
            return pb.ChallengeReply(host=self._trust.host)
        nonce = self._mint.issue(request.nonce)
        proof = Prover(secret, _PURPOSE, request.nonce, nonce).proof(Side.SERVER)
        return pb.ChallengeReply(nonce=nonce, proof=proof, fingerprint=secret.fingerprint, host=self._trust.host)

    async def admit(self, context: Any, method: str) -> None:
        """Return if the caller may use `method`; else abort with UNAUTHENTICATED or PERMISSION_DENIED and a reason."""
        secret = self._trust.secret
        await self._check_address(context)
        if secret is None:
            return
        shown = {key: value for key, value in context.invocation_metadata() if key in _KEYS}
        if len(shown) < len(_KEYS):
            message = (
                f"{self._trust.host} requires the cluster secret {secret.fingerprint}; {method} came without proof"
            )
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, "no_proof", message)
        client_nonce, nonce, proof = (shown[key] for key in _KEYS)
        problem = self._mint.problem(nonce, client_nonce)
        if problem is None and not Prover(secret, _purpose_of(method), client_nonce, nonce).holds(Side.CLIENT, proof):
            problem = "its proof is wrong"
        if problem is not None:
            message = f"{self._trust.host} requires the cluster secret {secret.fingerprint}; {method} is refused: "
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, "bad_proof", message + problem)
        self._mint.use(nonce)

    async def _check_address(self, context: Any) -> None:
        address = peer_address(context)
        if self._trust.secret is None and not self._trust.has_address(address):
            message = self._trust.unlisted(address)
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, "unknown_peer", message)

    async def _refuse(self, context: Any, code: grpc.StatusCode, reason: str, message: str) -> NoReturn:
        self.refused += 1
        self._log_refusal(reason, f"{peer_address(context)}: {message}")
        await context.abort(code, message)
        raise AssertionError("abort raises")

    def _log_refusal(self, reason: str, message: str) -> None:
        """Log a refusal, rate-limited: an unauthenticated peer may call as often as it likes."""
        self._refusals.warning("caller_refused", reason, reason=message)


def peer_address(context: Any) -> str:
    """Return the numeric address of a call's peer from gRPC's `ipv4:10.0.0.1:1234` or `ipv6:%5B::1%5D:1234`."""
    peer = urllib.parse.unquote(str(context.peer()))
    return peer.partition(":")[2].rpartition(":")[0].strip("[]")


def _purpose_of(method: str) -> str:
    return f"{_PURPOSE} {method}"
