"""An instance's place on a node, with real short-lived processes and without Ray."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdserve import __version__
from pdserve.ray_cluster import host as module
from pdserve.ray_cluster.actor import answer
from pdserve.ray_cluster.host import NodePlace, RayInstanceHost
from pdserve.ray_cluster.messages import (
    LaunchRequest,
    NodeRequest,
    Placement,
    PollReply,
    PollRequest,
    RemoteFailure,
    decode,
    encode,
)
from wire.errors import ConfigError, Incompatible

_CPU = NodeRequest("cpu", ("3", "4"), __version__)
_STAYS = "import signal; print('up', flush=True); signal.pause()"
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayInstanceHost]:
    """A host whose processes run the code that their flags contain."""
    monkeypatch.setattr(module, "launch_command", lambda host, port, flags: (sys.executable, "-S", "-c", *flags))
    made = RayInstanceHost(
        NodePlace("n1", "127.0.0.1", {}), {**os.environ, "RAY_X": "1", "OMP_NUM_THREADS": "1"}, tmp_path
    )
    yield made
    made.stop()
    assert list(tmp_path.glob("pdserve-ray-*")) == []


def _launch_request(code: str, **changed: str) -> LaunchRequest:
    return LaunchRequest(**{
        "name": "decode-0", "role": "decode", "flags": (code,), "global_name": "g.json", "global_table": "{}",
        "local_name": "l.json", "local_table": "[]", "secret": "s\n", "folder": "/", **changed,
    })  # type: ignore[arg-type] # fmt: skip


def _until(node: RayInstanceHost, words: str) -> PollReply:
    reply = node.poll(PollRequest(0, None))
    while words not in reply.log:
        assert reply.exit_status is None, reply
        reply = node.poll(PollRequest(0, None))
    return reply


def _wait_for_end(node: RayInstanceHost) -> PollReply:
    reply = node.poll(PollRequest(0, None))
    while reply.exit_status is None:
        reply = node.poll(PollRequest(0, None))
    return reply


def test_a_placement_on_cpus_has_its_devices_and_a_free_port(node: RayInstanceHost) -> None:
    placement = node.place(_CPU)

    assert (placement.node_id, placement.ip, placement.device_ids) == ("n1", "127.0.0.1", ("3", "4"))
    assert placement.device_ips == ("127.0.0.1", "127.0.0.1")
    assert 0 < placement.port < 65536
    assert node.place(_CPU) == placement  # a restart stays where it was


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["6", "7"], ("6", "7")), (["GPU-1a", "GPU-2b"], ("3", "4")), (["6"], ("3", "4")), ([], ("3", "4"))],
)
def test_numbered_devices_are_those_that_ray_assigned(
    tmp_path: Path, given: Sequence[str], expected: tuple[str, ...]
) -> None:
    node = RayInstanceHost(NodePlace("n1", "127.0.0.1", {"cuda": given}), {}, tmp_path)

    placement = node.place(NodeRequest("cuda", ("3", "4"), __version__))

    assert placement.device_ids == expected
    node.stop()


def test_npus_have_the_addresses_of_their_own_network(tmp_path: Path) -> None:
    tool = tmp_path / "hccn_tool"
    tool.write_text('#!/bin/sh\necho "ipaddr:192.0.2.1$2"\necho netmask:255.255.255.0\n')
    tool.chmod(0o755)
    where = NodePlace("n1", "127.0.0.1", {"npu": ["6", "7"]})
    node = RayInstanceHost(where, {"HCCN_TOOL_PATH": str(tool)}, tmp_path)

    placement = node.place(NodeRequest("npu", ("0", "1"), __version__))

    node.stop()
    assert (placement.device_ids, placement.device_ips) == (("6", "7"), ("192.0.2.16", "192.0.2.17"))


def test_another_version_on_the_node_is_refused_with_both_versions(node: RayInstanceHost) -> None:
    with pytest.raises(Incompatible, match=f"pdserve {__version__} is installed on this node, but 9.9 where `up` runs"):
        node.place(NodeRequest("cpu", ("0",), "9.9"))


def test_the_process_gets_tables_and_secret_but_no_ray_variables(node: RayInstanceHost) -> None:
    placement = node.place(_CPU)
    code = "import json, os; print(json.dumps(dict(os.environ)), os.getcwd(), flush=True)"

    node.start(_launch_request(code))

    log = _wait_for_end(node).log
    environ = json.loads(log[: log.rindex("}") + 1])
    table = Path(environ["GLOBAL_RANK_TABLE_FILE_PATH"])
    assert (table.read_text(), Path(environ["RANK_TABLE_FILE_PATH"]).read_text()) == ("{}", "[]")
    assert (table.parent / "cluster_secret").read_text() == "s\n"
    assert {path.stat().st_mode & 0o777 for path in table.parent.iterdir() if path.name not in ("log", "lock")} == {
        0o600
    }
    assert table.parent.stat().st_mode & 0o777 == 0o700
    assert not {"RAY_X", "OMP_NUM_THREADS"} & set(environ)
    assert log.endswith("} /\n")
    assert placement.port != 0


def test_its_log_is_read_in_whole_lines_from_an_offset(node: RayInstanceHost) -> None:
    node.place(_CPU)
    node.start(_launch_request("import signal, sys; print('one'); print('tw', end='', flush=True); signal.pause()"))

    first = _until(node, "one")
    assert (first.log, first.offset, first.more) == ("one\n", 4, False)
    assert node.poll(PollRequest(first.offset, None)).log == ""
    os.kill(first.pid, 9)
    last = _wait_for_end(node)
    assert (last.log, last.exit_status) == ("one\ntw", -9)


def test_a_long_log_is_read_in_parts(node: RayInstanceHost) -> None:
    node.place(_CPU)
    node.start(_launch_request("print('x' * 100_000)"))

    _wait_for_end(node)
    first = node.poll(PollRequest(0, None))
    assert (len(first.log), first.more) == (65_536, True)
    second = node.poll(PollRequest(first.offset, None))
    assert (len(first.log + second.log), second.more) == (100_001, False)


def test_a_new_table_replaces_the_old_one(node: RayInstanceHost) -> None:
    node.place(_CPU)
    node.start(
        _launch_request(
            "import os, signal; print(os.environ['GLOBAL_RANK_TABLE_FILE_PATH'], flush=True); signal.pause()"
        )
    )
    table = Path(_until(node, "g.json").log.strip())
    before = table.stat().st_ino

    node.poll(PollRequest(0, '{"version": "1.0"}'))

    assert table.read_text() == '{"version": "1.0"}'
    assert table.stat().st_ino != before  # renamed over, never half written
    assert sorted(path.name for path in table.parent.iterdir()) == ["cluster_secret", "g.json", "l.json", "lock", "log"]


def test_a_process_that_died_is_restarted_in_the_same_place(node: RayInstanceHost) -> None:
    node.place(_CPU)
    node.start(_launch_request("print('first')"))
    first = _wait_for_end(node)

    node.start(_launch_request("print('second')"))

    reply = _wait_for_end(node)
    assert (reply.log, reply.offset) == ("first\nsecond\n", 13)
    assert reply.pid != first.pid


def test_a_second_process_in_the_same_place_is_refused(node: RayInstanceHost) -> None:
    node.place(_CPU)
    node.start(_launch_request(_STAYS))

    with pytest.raises(ConfigError, match="decode-0 already runs here, as pid"):
        node.start(_launch_request(_STAYS))


def test_a_name_with_a_path_is_not_a_file_name(node: RayInstanceHost, tmp_path: Path) -> None:
    node.place(_CPU)

    with pytest.raises(ConfigError, match="is not a file name"):
        node.start(_launch_request(_STAYS, global_name="../g.json"))
    assert not (tmp_path / "g.json").exists()


def test_stopping_sends_sigterm_first(node: RayInstanceHost) -> None:
    node.place(_CPU)
    node.start(_launch_request(_STAYS))
    _until(node, "up")

    assert answer(node, "stop", "") == (True, "stopped")


@pytest.mark.long
def test_a_process_that_ignores_sigterm_is_killed(node: RayInstanceHost) -> None:
    node.place(_CPU)
    node.start(_launch_request(_STUBBORN))
    _until(node, "up")

    assert answer(node, "stop", "") == (True, "killed")


def test_calls_return_text_and_no_exception_crosses(node: RayInstanceHost) -> None:
    done, text = answer(node, "place", encode(_CPU))
    assert (done, decode(Placement, text).ip) == (True, "127.0.0.1")

    done, text = answer(node, "place", encode(NodeRequest("cpu", ("0",), "9.9")))
    assert (done, decode(RemoteFailure, text).error) == (False, "Incompatible")
    done, text = answer(node, "place", "{")
    assert (done, decode(RemoteFailure, text).error) == (False, "InternalError")
    done, text = answer(node, "poll", encode(PollRequest(0, None)))
    assert (done, decode(RemoteFailure, text).error) == (False, "InternalError")
