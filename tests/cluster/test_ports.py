"""Every port of a running cluster: listed in docs/ports.md, on loopback, pinned by its flag, unharmed by garbage."""

import contextlib
import http.client
import pickle
import re
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from kvtransfer.link_codec import MAGIC, PREFIX
from kvtransfer.link_messages import MessageType
from pdserve.ports import free_ports
from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.secret import ensure_secret
from scheduler.links.admin_socket import socket_name
from security.trust import spell
from tests.cluster.guide import GuideCluster, Tables
from tests.cluster.listening import Listening, documented, sockets_of
from wire.types import PROTOCOL_VERSION

pytestmark = pytest.mark.cluster

DEADLINE_S = 300.0
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
HIDDEN = (
    "/docs", "/redoc", "/debug", "/debug/pprof", "/debug/vars", "/env", "/run_script", "/shutdown",
    "/pause", "/resume", "/sleep", "/wake_up", "/collective_rpc", "/start_profile", "/stop_profile", "/server_info",
    "/reset_prefix_cache", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/register",
    "/unregister", "/cluster_state", "/steady_clock_offset", "/kv_transfer", "/v1/kv_transfer", "/instances", "/admin",
    "/config", "/quota", "/api/jobs", "/pdserve.wire.Instance/Describe",
)  # fmt: skip


class Pinned:
    """A cluster on loopback: prefill's ports are all pinned, decode's are the defaults."""

    def __init__(self, folder: Path, model: Path) -> None:
        ensure_secret(folder)
        self.kv_port, self.http_port, *entry_ports = free_ports(4)
        made = gen(
            GenArguments(("4",), ("6",), True, str(folder), "127.0.0.1", ",".join(map(str, entry_ports)), "cpu"),
            lambda line: None, {},
        )  # fmt: skip
        tables = Tables(folder / made.global_name, tuple(folder / local.file_name for local in made.locals))
        self.cluster = GuideCluster(
            folder, model, prefill=("4",), decode=("6",), tables=tables, flags=("--engine=fake",)
        )
        self._prefill_flags = (
            f"--kv-port-range={self.kv_port}-{self.kv_port}", f"--http-port={self.http_port}", "--host=127.0.0.1",
        )  # fmt: skip

    def up(self) -> None:
        self.cluster.start("prefill-0", flags=self._prefill_flags)
        self.cluster.start("decode-0", flags=("--host=127.0.0.1",))
        self.cluster.start("scheduler", flags=("--host=127.0.0.1",))
        self.cluster.wait_ready()

    def listening(self) -> set[Listening]:
        return {one for name, p in self.cluster.processes.items() for one in sockets_of(name, p.pid)}

    def kind(self, one: Listening) -> str:
        """Return the name docs/ports.md should have for a socket."""
        if one.host == f"@{socket_name('127.0.0.1', self.cluster.port)}":
            return "scheduler admin socket"
        if one.process == "scheduler":
            return "scheduler http" if one.port == self.cluster.port else f"undocumented port {one.port}"
        if one.port is None:
            known = re.fullmatch(r"@pdserve-(kv|entry)-[0-9a-f]{32}", one.host)
            names = {"kv": "instance kv unix", "entry": "instance entry lock"}
            return names[known[1]] if known else f"undocumented socket {one.host}"
        pinned = dict.fromkeys(self.cluster.ports, "instance grpc")
        pinned |= {self.http_port: "instance http", self.kv_port: "instance kv tcp"}
        return pinned.get(one.port, "instance kv tcp")

    def assert_serves(self) -> None:
        reply = self.cluster.client.post("/v1/completions", ASK)
        assert reply.status == 200, reply.body


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory, fake_model: Path) -> Iterator[Pinned]:
    made = Pinned(tmp_path_factory.mktemp("pinned"), fake_model)
    with made.cluster:
        made.up()
        yield made


def test_every_listening_socket_is_in_the_docs_and_on_loopback(pinned: Pinned) -> None:
    found = pinned.listening()

    assert {pinned.kind(one) for one in found} == set(documented())
    for one in found:
        assert one.port is None or ip_address(spell(one.host) or "").is_loopback, one
    by_process = {
        name: sorted(pinned.kind(one) for one in found if one.process == name) for name in pinned.cluster.names
    }
    assert by_process == {
        "prefill-0": ["instance entry lock", "instance grpc", "instance http", "instance kv tcp", "instance kv unix"],
        "decode-0": ["instance entry lock", "instance grpc", "instance kv tcp", "instance kv unix"],
    }


def test_pinned_ports_are_exactly_those_of_the_flags(pinned: Pinned) -> None:
    ports = {one.port for one in pinned.listening() if one.process == "prefill-0" and one.port is not None}

    assert ports == {pinned.cluster.ports[0], pinned.kv_port, pinned.http_port}
    of_scheduler = {one.port for one in pinned.listening() if one.process == "scheduler" and one.port is not None}
    assert of_scheduler == {pinned.cluster.port}


def _connect(one: Listening) -> socket.socket:
    if one.port is None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE_S)
        sock.connect("\0" + one.host[1:])
        return sock
    return socket.create_connection((one.host, one.port), timeout=DEADLINE_S)


@pytest.mark.parametrize(
    "blob",
    [
        pickle.dumps({"__reduce__": list(range(300))}),
        b"\x80\x04\x95" + b"\xff" * 8 + b"cos\nsystem\n",
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, MessageType.HELLO, 0, 2**32 - 1),
        PREFIX.pack(b"EVIL", PROTOCOL_VERSION, MessageType.HELLO, 0, 0),
        bytes(2048),
        b"\r\n\r\n" * 600,
    ],
    ids=["pickle", "pickle opcodes", "absurd length", "wrong magic", "zeros", "line ends"],
)
def test_garbage_on_every_port_is_cut_and_the_cluster_serves(pinned: Pinned, blob: bytes) -> None:
    for one in pinned.listening():
        if pinned.kind(one) == "instance entry lock":  # it accepts nothing
            continue
        with contextlib.closing(_connect(one)) as sock:
            answer = bytearray()
            with contextlib.suppress(ConnectionError):
                sock.sendall(blob)
                with contextlib.suppress(OSError):  # the other end of a Unix socket has closed already
                    sock.shutdown(socket.SHUT_WR)
                while data := sock.recv(65536):  # the socket's deadline ends a port that neither answers nor closes
                    answer += data
            assert not re.match(rb"HTTP/1\.. 2", bytes(answer)), (pinned.kind(one), bytes(answer[:200]))

    pinned.assert_serves()
    for process in pinned.cluster.processes.values():
        assert "Traceback" not in process.log


def _status(port: int, method: str, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
def test_no_http_port_has_a_hidden_route(pinned: Pinned, host: str) -> None:
    open_ones = [
        (port, method, path)
        for port in (pinned.cluster.port, pinned.http_port)
        for path in HIDDEN
        for method in ("GET", "POST", "DELETE", "PUT", "OPTIONS")
        if _status(port, method, path, {"Host": host}) != 404
    ]

    assert not open_ones


def test_the_api_description_is_the_schedulers_and_read_only(pinned: Pinned) -> None:
    assert _status(pinned.cluster.port, "GET", "/openapi.json", {}) == 200
    assert _status(pinned.cluster.port, "POST", "/openapi.json", {}) == 405
    assert _status(pinned.http_port, "GET", "/openapi.json", {}) == 404


def test_an_instances_own_http_is_read_only(pinned: Pinned) -> None:
    for path in ("/health", "/metrics"):
        assert _status(pinned.http_port, "GET", path, {}) == 200
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert _status(pinned.http_port, method, path, {}) == 405


@pytest.mark.parametrize(
    "field",
    [
        {"kv_transfer_params": {"remote_host": "192.0.2.9", "remote_port": 1, "tp_size": 2**31}},
        {"kv_transfer_params": {}},
        {"ticket": {"ticket_id": "ab" * 16}},
        {"endpoints": [{"transport": "tcp", "address": "192.0.2.9:1"}]},
        {"epoch": 2**63},
    ],
)
def test_a_client_can_set_no_transfer_field(pinned: Pinned, field: dict[str, object]) -> None:
    reply = pinned.cluster.client.post("/v1/completions", ASK | field)

    assert reply.status == 400, reply.body
    assert next(iter(field)) in reply.json()["error"]["message"]


def test_a_request_id_that_is_an_address_is_never_dialled(pinned: Pinned) -> None:
    with socket.create_server(("127.0.0.1", 0)) as decoy:
        port = decoy.getsockname()[1]
        for name in (f"___prefill_addr_127.0.0.1:{port}___decode_addr_127.0.0.1:{port}", f"http://127.0.0.1:{port}/"):
            connection = http.client.HTTPConnection("127.0.0.1", pinned.cluster.port, timeout=DEADLINE_S)
            body = '{"model": "tiny", "prompt": "hello", "max_tokens": 4}'
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json", "X-Request-Id": name}
            )
            assert connection.getresponse().status in (200, 400)
            connection.close()
        dialled = [
            one
            for process in pinned.cluster.processes.values()
            for one in psutil.Process(process.pid).net_connections("tcp")
            if one.raddr and one.raddr.port == port
        ]
        decoy.setblocking(False)

        assert not dialled
        with pytest.raises(BlockingIOError):
            decoy.accept()
