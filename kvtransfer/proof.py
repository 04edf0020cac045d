"""CHALLENGE and PROOF: before WELCOME each end proves that it holds the cluster secret.

A proof covers both nonces and the HELLO.

CHALLENGE | nonce 16 bytes | proof 32 bytes | texts: fingerprint, host |
PROOF     | proof 32 bytes | texts: fingerprint, host |

If neither end has a secret, fingerprints are empty and proofs zero. The peer itself is checked instead: on TCP its
address must be in the global table, on a Unix socket its process must run as the same user.
"""

import secrets
import socket
import struct
from dataclasses import dataclass

from kvtransfer import shm
from kvtransfer.hello import NONCE_BYTES, Hello
from kvtransfer.link_codec import WireError, pack, pack_text, unpack_texts
from kvtransfer.link_messages import MessageType
from kvtransfer.stream import LinkLost, Stream
from security.secret import PROOF_BYTES, Prover, Side, differ, readable
from security.trust import Trust, printable
from wire.errors import Incompatible, Unavailable

_CHALLENGE = struct.Struct(f"!{NONCE_BYTES}s{PROOF_BYTES}s")
_PROOF = struct.Struct(f"!{PROOF_BYTES}s")
_NO_PROOF = bytes(PROOF_BYTES)
_PURPOSE = "kv"


@dataclass(frozen=True, slots=True)
class Challenge:
    """The receiver's proof and request for the sender's; `fingerprint` is empty if the receiver has no secret."""

    nonce: bytes
    proof: bytes
    fingerprint: str
    host: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The sender's answer."""

    proof: bytes
    fingerprint: str
    host: str


def check_peer(stream: Stream, trust: Trust) -> None:
    """Raise an error for a peer that must not even start the handshake.

    Raises Incompatible for an address that is not in the table, if there is no secret, and Unavailable for another
    user's Unix socket, since TCP may work.
    """
    sock = stream.socket
    try:
        if sock.family != socket.AF_UNIX:
            trust.check_address(str(sock.getpeername()[0]))
        elif not shm.is_same_user(sock):
            raise Unavailable("another user's process is at the other end of the Unix socket")
    except OSError as error:
        raise LinkLost(f"the connection broke: {error}") from error


def make_challenge(trust: Trust, hello: Hello, hello_body: bytes) -> Challenge:
    """Return the receiver's answer to a HELLO."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    prover = _prover(trust, hello, nonce, hello_body)
    proof = _NO_PROOF if prover is None else prover.proof(Side.SERVER)
    return Challenge(nonce, proof, _fingerprint(trust), trust.host)


def check_challenge(trust: Trust, hello: Hello, hello_body: bytes, challenge: Challenge) -> None:
    """Raise Incompatible unless the receiver has proven that it holds our secret, or neither end has one."""
    _check(trust, Side.SERVER, challenge, _prover(trust, hello, challenge.nonce, hello_body), hello.receiver_id)


def make_proof(trust: Trust, hello: Hello, hello_body: bytes, challenge: Challenge) -> Proof:
    """Return the sender's proof for a challenge that was checked."""
    prover = _prover(trust, hello, challenge.nonce, hello_body)
    return Proof(_NO_PROOF if prover is None else prover.proof(Side.CLIENT), _fingerprint(trust), trust.host)


def no_proof(trust: Trust) -> Proof:
    """Return a PROOF that only shows the receiver our secret's fingerprint, so that it can report the mismatch."""
    return Proof(_NO_PROOF, _fingerprint(trust), trust.host)


def check_proof(trust: Trust, hello: Hello, hello_body: bytes, challenge: Challenge, proof: Proof) -> None:
    """Raise Incompatible unless the sender has proven that it holds our secret, or neither end has one."""
    _check(trust, Side.CLIENT, proof, _prover(trust, hello, challenge.nonce, hello_body), hello.sender_id)


def encode_challenge(challenge: Challenge) -> bytes:
    """Return prefix and body of CHALLENGE."""
    texts = pack_text(challenge.fingerprint) + pack_text(challenge.host)
    return pack(MessageType.CHALLENGE, _CHALLENGE.pack(challenge.nonce, challenge.proof) + texts)


def decode_challenge(body: bytes | bytearray) -> Challenge:
    """Decode CHALLENGE. Raises WireError."""
    try:
        nonce, proof = _CHALLENGE.unpack_from(body)
        fingerprint, host = unpack_texts(memoryview(body)[_CHALLENGE.size :], 2)
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed CHALLENGE of {len(body)} bytes: {error}") from error
    return Challenge(nonce, proof, fingerprint, host)


def encode_proof(proof: Proof) -> bytes:
    """Return prefix and body of PROOF."""
    return pack(MessageType.PROOF, _PROOF.pack(proof.proof) + pack_text(proof.fingerprint) + pack_text(proof.host))


def decode_proof(body: bytes | bytearray) -> Proof:
    """Decode PROOF. Raises WireError."""
    try:
        (proof,) = _PROOF.unpack_from(body)
        fingerprint, host = unpack_texts(memoryview(body)[_PROOF.size :], 2)
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed PROOF of {len(body)} bytes: {error}") from error
    return Proof(proof, fingerprint, host)


def _prover(trust: Trust, hello: Hello, nonce: bytes, hello_body: bytes) -> Prover | None:
    return None if trust.secret is None else Prover(trust.secret, _PURPOSE, hello.nonce, nonce, hello_body)


def _check(trust: Trust, side: Side, message: Challenge | Proof, prover: Prover | None, peer_id: str) -> None:
    peer_fingerprint, peer = readable(message.fingerprint), f"{printable(peer_id)}, {printable(message.host)}"
    if peer_fingerprint != _fingerprint(trust):
        raise Incompatible(differ(trust.secret, trust.host, peer_fingerprint, peer))
    if prover is not None and not prover.holds(side, message.proof):
        raise Incompatible(
            f"{peer} claims to hold this cluster's secret {peer_fingerprint} (known on {trust.host}) "
            "but cannot prove that it holds it"
        )


def _fingerprint(trust: Trust) -> str:
    return "" if trust.secret is None else trust.secret.fingerprint
