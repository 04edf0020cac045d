"""The doctor's checks of addresses, ports and proxies, against real sockets."""

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.ports import free_ports
from ranktable_tools.doctor.case import DoctorTables
from ranktable_tools.doctor.listeners import listener
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.network import bypasses, check_address, check_ports, check_proxy, check_reach
from ranktable_tools.doctor.tcp import can_listen, probe_port
from tests.ranktable_tools.bench import ELSEWHERE, HERE, Bench, server, tables
from tests.security.certificates import Authority

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@contextlib.contextmanager
def _listener(answer: bytes | None, host: str = HERE, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Listen on a free port; send every client `answer`, or nothing until it leaves if None; by TLS with `context`."""
    with socket.create_server((host, 0)) as listening:
        thread = threading.Thread(target=_answer, args=(listening, answer, context), daemon=True)
        thread.start()
        yield int(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(300)


def _answer(listening: socket.socket, answer: bytes | None, context: ssl.SSLContext | None) -> None:
    while True:
        try:
            plain, _ = listening.accept()
        except OSError:
            return
        with contextlib.suppress(OSError), plain:
            connection = plain if context is None else context.wrap_socket(plain, server_side=True)
            connection.recv(64)
            connection.sendall(answer) if answer is not None else connection.recv(64)


def _free_port(host: str = HERE) -> int:
    return free_ports(1, host)[0]


def _given(ports: tuple[int, int], decode_host: str = HERE) -> DoctorTables:
    return tables([server(HERE, "0", ports[0])], [server(decode_host, "1", ports[1])])


def test_grpc_is_distinguished_from_other_servers() -> None:
    with _listener(SETTINGS) as grpc, _listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as http, _listener(b"") as short:
        states = [probe_port(HERE, port, 30.0).state for port in (grpc, http, short)]

    assert states == ["gRPC", "other", "other"]
    assert probe_port(HERE, _free_port(), 2.0).state == "free"


def test_a_silent_port_costs_no_more_than_its_deadline() -> None:
    with _listener(None) as silent:
        assert probe_port(HERE, silent, 0.05).state == "other"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_mutual_tls_is_distinguished_from_other_servers(tmp_path: Path, version: ssl.TLSVersion) -> None:
    files = Authority(tmp_path).sign("instance")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = version

    with _listener(SETTINGS, context=context) as port:
        answer = probe_port(HERE, port, 30.0)

    assert answer.state == "TLS"


def test_an_unknown_host_is_reported_with_a_reason() -> None:
    answer = probe_port("no-such-host.invalid", 1, 2.0)

    assert answer.state == "unreachable"
    assert answer.reason


def test_a_port_in_use_cannot_be_listened_on() -> None:
    with socket.create_server((HERE, 0)) as listening:
        assert can_listen(HERE, listening.getsockname()[1]) == "in use"
    assert can_listen(HERE, _free_port()) is None


def test_ports_that_are_free_or_answered_by_grpc_are_ok(tmp_path: Path) -> None:
    bench, free = Bench(tmp_path), _free_port()
    with _listener(SETTINGS) as taken:
        verdict = check_ports(bench.case(_given((taken, free))))

    assert (verdict.result, verdict.message) == ("ok", f"{taken} answers, {free} is free")


def test_a_port_taken_by_something_else_is_a_failure(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with _listener(b"HTTP/1.1 200 OK\r\n\r\n") as taken:
        verdict = check_ports(bench.case(_given((taken, _free_port()))))

    words = f"127.0.0.1:{taken} (prefill) is taken by something, which does not speak gRPC"
    assert (verdict.result, verdict.message) == ("fail", words)


@pytest.mark.parametrize(("host", "family"), [(HERE, socket.AF_INET), ("::1", socket.AF_INET6)])
def test_the_process_that_has_a_port_is_named(host: str, family: socket.AddressFamily) -> None:
    machine = Machine({})
    own = (machine.text("/proc/self/comm") or "").strip()
    try:
        listening = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")

    with listening:
        named = listener(machine, listening.getsockname()[1])

    assert named == f"{own} (pid {os.getpid()})"
    assert listener(machine, _free_port()) is None


def test_node_ports_take_precedence_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = _free_port(), _free_port()
    named = check_ports(bench.case(_given((1, 1)), {"NODE_PORTS": f"{first},{second}"}))
    wrong = check_ports(bench.case(_given((1, 1)), {"NODE_PORTS": "8088"}))

    assert named.message == f"{first} is free, {second} is free"
    assert wrong.result == "fail"
    assert 'NODE_PORTS is "8088": 1 port, but the global table has 2 instances' in wrong.message


def test_without_ports_nothing_is_probed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    unknown = tables([server(HERE, "0")], [server(HERE, "1")])

    assert check_ports(bench.case()).result == "not here"
    assert check_ports(bench.case(unknown)).message == "the table has no server_port and NODE_PORTS is not set"
    assert check_reach(bench.case(unknown)).result == "not here"


def test_remote_instances_answer_or_have_to_be_started(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with _listener(SETTINGS, ELSEWHERE) as port:
        answering = check_reach(bench.case(_given((1, port), ELSEWHERE)))
    silent = _free_port(ELSEWHERE)
    absent = check_reach(bench.case(_given((1, silent), ELSEWHERE)))

    assert (answering.result, answering.message) == ("ok", "1 instance on other hosts can be reached")
    assert (absent.result, absent.message) == ("warn", f"nothing listens at {ELSEWHERE}:{silent} (decode)")
    assert absent.next_step == "start that instance"


def test_a_host_checks_the_other_role_and_the_scheduler_checks_all(tmp_path: Path) -> None:
    bench, unknown = Bench(tmp_path), "no-such-host.invalid"
    prefill, decode = server(HERE, "0", 1), server(HERE, "1", 2)
    others = ([prefill, server(unknown, "0", 3)], [decode, server(unknown, "1", 4)])
    lost = {
        name: check_reach(bench.case(tables(*others, local=local, scheduler=scheduler))).message
        for name, local, scheduler in (
            ("prefill", prefill, unknown), ("decode", decode, unknown), ("scheduler", server(HERE), HERE),
            ("scheduler's host", None, HERE), ("instances' host", None, unknown),
        )
    }  # fmt: skip

    fields = {name: [role for role in ("prefill", "decode") if f"({role})" in words] for name, words in lost.items()}
    assert fields == {
        "prefill": ["decode"],
        "decode": ["prefill"],
        "scheduler": ["prefill", "decode"],
        "scheduler's host": ["prefill", "decode"],
        "instances' host": ["prefill", "decode"],
    }


def test_a_host_that_cannot_be_reached_is_a_failure(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    verdict = check_reach(bench.case(_given((1, 8089), "no-such-host.invalid")))

    assert verdict.result == "fail"
    assert verdict.message.startswith("no-such-host.invalid:8089 (decode): ")
    assert "no-such-host.invalid (docs/ports.md)" in verdict.next_step


def test_the_local_table_has_to_be_this_hosts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    here, away = server(HERE, "0"), server(ELSEWHERE, "1")

    mine = check_address(bench.case(tables([here], [server(HERE, "1")], local=here)))
    theirs = check_address(bench.case(tables([here], [away], local=away)))

    assert mine.result == "ok"
    assert theirs.result == "fail"
    assert theirs.message.startswith(f"the local table says {ELSEWHERE}, but this machine has ")


def test_loopback_in_a_table_of_several_hosts_is_a_failure(tmp_path: Path) -> None:
    own = server(HERE, "0")

    verdict = check_address(Bench(tmp_path).case(tables([own], [server("10.9.9.9", "1")], local=own)))

    assert (verdict.result, verdict.message) == ("fail", "the local table says 127.0.0.1, which 10.9.9.9 cannot reach")


def test_a_table_without_this_host_is_a_warning(tmp_path: Path) -> None:
    away = tables([server(ELSEWHERE, "0")], [server("127.0.0.3", "1")], scheduler=ELSEWHERE)

    verdict = check_address(Bench(tmp_path).case(away))

    assert (verdict.result, verdict.message) == ("warn", "none of the table's hosts is this one: 127.0.0.2, 127.0.0.3")


def test_a_proxy_has_to_exclude_the_tables_hosts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    two_hosts = tables([server(HERE, "0")], [server("10.0.0.19", "1")])
    proxy = {"http_proxy": "http://user:pa55word@proxy:3128"}

    assert check_proxy(bench.case(two_hosts)).message == "no proxy is set"
    lacking = check_proxy(bench.case(two_hosts, {**proxy, "no_proxy": "localhost,127.0.0.1"}))
    whole = check_proxy(bench.case(two_hosts, {**proxy, "NO_PROXY": "localhost,127.0.0.1,10.0.0.0/24"}))

    words = "http_proxy is set, but no_proxy lacks 10.0.0.19: requests there would go through the proxy"
    assert (lacking.result, lacking.message) == ("warn", words)
    assert lacking.next_step == "export no_proxy=${no_proxy:+$no_proxy,}10.0.0.19"
    assert whole.result == "ok"
    assert "pa55word" not in f"{lacking} {whole}"


@pytest.mark.parametrize(
    ("host", "no_proxy", "covered"),
    [
        ("10.0.0.18", "10.0.0.18", True),
        ("10.0.0.18", "10.0.0.1", False),
        ("10.0.0.18", " 10.0.0.0/24 ", True),
        ("npu-7.example", ".example", True),
        ("npu-7.example", "example", True),
        ("npu-7.example", "7.example", False),
        ("anything", "*", True),
        ("10.0.0.18", "", False),
        ("npu-7", "10.0.0.0/8", False),
    ],
)
def test_no_proxy_is_read_as_clients_read_it(host: str, no_proxy: str, covered: bool) -> None:
    assert bypasses(host, no_proxy) is covered
