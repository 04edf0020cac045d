"""Probe a TCP port for what listens there: nothing, gRPC, TLS, or something else. Each probe has a deadline."""

import errno
import socket
import ssl
from dataclasses import dataclass
from typing import Literal

PortState = Literal["gRPC", "TLS", "other", "free", "silent", "unreachable"]
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # RFC 9113, 3.4: empty SETTINGS
_FRAME_HEADER_BYTES = 9
_SETTINGS = 4


@dataclass(frozen=True, slots=True)
class PortAnswer:
    """The result of a probe: `free` if the host refuses, `silent` without a response; `reason` is the kernel's."""

    state: PortState
    reason: str = ""


def probe_port(host: str, port: int, timeout_s: float) -> PortAnswer:
    """Connect to host:port and check whether it speaks HTTP/2, and so gRPC."""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            if _speaks_http2(connection):
                return PortAnswer("gRPC")
        return PortAnswer("TLS" if _speaks_tls(host, port, timeout_s) else "other")
    except ConnectionRefusedError:
        return PortAnswer("free")
    except TimeoutError:
        return PortAnswer("silent", f"no response within {timeout_s:g} s")
    except OSError as error:
        return PortAnswer("unreachable", error.strerror or str(error))


def can_listen(host: str, port: int) -> str | None:
    """Return why this machine cannot listen on host:port, or None."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return None


def _speaks_tls(host: str, port: int, timeout_s: float) -> bool:
    """Return whether a TLS server responds; the certificate is not verified, and the server may require a client's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), timeout_s) as plain, context.wrap_socket(plain) as connection:
            return connection.version() is not None
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


def _speaks_http2(connection: socket.socket) -> bool:
    try:
        connection.sendall(_PREFACE)
        received = b""
        while len(received) < _FRAME_HEADER_BYTES:
            more = connection.recv(_FRAME_HEADER_BYTES - len(received))
            if not more:
                return False
            received += more
    except OSError:
        return False
    return received[3] == _SETTINGS
