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
from pdserve.ray_cluster.messages import Look, News, NodeRequest, Orders, RemoteFailure, Seat, decode, encode
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


def _orders(code: str, **changed: str) -> Orders:
    return Orders(**{
        "name": "decode-0", "role": "decode", "flags": (code,), "global_name": "g.json", "global_table": "{}",
        "local_name": "l.json", "local_table": "[]", "secret": "s\n", "folder": "/", **changed,
    })  # type: ignore[arg-type] # fmt: skip


def _until(node: RayInstanceHost, words: str) -> News:
    news = node.news(Look(0, None))
    while words not in news.log:
        assert news.exit_status is None, news
        news = node.news(Look(0, None))
    return news


def _ended(node: RayInstanceHost) -> News:
    news = node.news(Look(0, None))
    while news.exit_status is None:
        news = node.news(Look(0, None))
    return news


def test_a_placement_on_cpus_has_its_devices_and_a_free_port(node: RayInstanceHost) -> None:
    seat = node.seat(_CPU)

    assert (seat.node_id, seat.ip, seat.device_ids) == ("n1", "127.0.0.1", ("3", "4"))
    assert seat.device_ips == ("127.0.0.1", "127.0.0.1")
    assert 0 < seat.port < 65536
    assert node.seat(_CPU) == seat  # a restart stays where it was


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["6", "7"], ("6", "7")), (["GPU-1a", "GPU-2b"], ("3", "4")), (["6"], ("3", "4")), ([], ("3", "4"))],
)
def test_numbered_devices_are_those_that_ray_assigned(
    tmp_path: Path, given: Sequence[str], expected: tuple[str, ...]
) -> None:
    node = RayInstanceHost(NodePlace("n1", "127.0.0.1", {"cuda": given}), {}, tmp_path)

    seat = node.seat(NodeRequest("cuda", ("3", "4"), __version__))

    assert seat.device_ids == expected
    node.stop()


def test_npus_have_the_addresses_of_their_own_network(tmp_path: Path) -> None:
    tool = tmp_path / "hccn_tool"
    tool.write_text('#!/bin/sh\necho "ipaddr:192.0.2.1$2"\necho netmask:255.255.255.0\n')
    tool.chmod(0o755)
    where = NodePlace("n1", "127.0.0.1", {"npu": ["6", "7"]})
    node = RayInstanceHost(where, {"HCCN_TOOL_PATH": str(tool)}, tmp_path)

    seat = node.seat(NodeRequest("npu", ("0", "1"), __version__))

    node.stop()
    assert (seat.device_ids, seat.device_ips) == (("6", "7"), ("192.0.2.16", "192.0.2.17"))


def test_another_version_on_the_node_is_refused_with_both_versions(node: RayInstanceHost) -> None:
    with pytest.raises(Incompatible, match=f"pdserve {__version__} is installed on this node, 9.9 where `up` runs"):
        node.seat(NodeRequest("cpu", ("0",), "9.9"))


def test_the_process_gets_tables_and_secret_but_no_ray_variables(node: RayInstanceHost) -> None:
    seat = node.seat(_CPU)
    code = "import json, os; print(json.dumps(dict(os.environ)), os.getcwd(), flush=True)"

    node.start(_orders(code))

    log = _ended(node).log
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
    assert seat.port != 0


def test_its_log_is_read_in_whole_lines_from_an_offset(node: RayInstanceHost) -> None:
    node.seat(_CPU)
    node.start(_orders("import signal, sys; print('one'); print('tw', end='', flush=True); signal.pause()"))

    first = _until(node, "one")
    assert (first.log, first.offset, first.more) == ("one\n", 4, False)
    assert node.news(Look(first.offset, None)).log == ""
    os.kill(first.pid, 9)
    last = _ended(node)
    assert (last.log, last.exit_status) == ("one\ntw", -9)


def test_a_long_log_is_read_in_parts(node: RayInstanceHost) -> None:
    node.seat(_CPU)
    node.start(_orders("print('x' * 100_000)"))

    _ended(node)
    first = node.news(Look(0, None))
    assert (len(first.log), first.more) == (65_536, True)
    second = node.news(Look(first.offset, None))
    assert (len(first.log + second.log), second.more) == (100_001, False)


def test_a_new_table_replaces_the_old_one(node: RayInstanceHost) -> None:
    node.seat(_CPU)
    node.start(
        _orders("import os, signal; print(os.environ['GLOBAL_RANK_TABLE_FILE_PATH'], flush=True); signal.pause()")
    )
    table = Path(_until(node, "g.json").log.strip())
    before = table.stat().st_ino

    node.news(Look(0, '{"version": "1.0"}'))

    assert table.read_text() == '{"version": "1.0"}'
    assert table.stat().st_ino != before  # renamed over, never half written
    assert sorted(path.name for path in table.parent.iterdir()) == ["cluster_secret", "g.json", "l.json", "lock", "log"]


def test_a_process_that_died_is_restarted_in_the_same_place(node: RayInstanceHost) -> None:
    node.seat(_CPU)
    node.start(_orders("print('first')"))
    first = _ended(node)

    node.start(_orders("print('second')"))

    news = _ended(node)
    assert (news.log, news.offset) == ("first\nsecond\n", 13)
    assert news.pid != first.pid


def test_a_second_process_in_the_same_place_is_refused(node: RayInstanceHost) -> None:
    node.seat(_CPU)
    node.start(_orders(_STAYS))

    with pytest.raises(ConfigError, match="decode-0 already runs here, as pid"):
        node.start(_orders(_STAYS))


def test_a_name_with_a_path_is_not_a_file_name(node: RayInstanceHost, tmp_path: Path) -> None:
    node.seat(_CPU)

    with pytest.raises(ConfigError, match="is not a file name"):
        node.start(_orders(_STAYS, global_name="../g.json"))
    assert not (tmp_path / "g.json").exists()


def test_stopping_sends_sigterm_first(node: RayInstanceHost) -> None:
    node.seat(_CPU)
    node.start(_orders(_STAYS))
    _until(node, "up")

    assert answer(node, "stop", "") == (True, "stopped")


@pytest.mark.long
def test_a_process_that_ignores_sigterm_is_killed(node: RayInstanceHost) -> None:
    node.seat(_CPU)
    node.start(_orders(_STUBBORN))
    _until(node, "up")

    assert answer(node, "stop", "") == (True, "killed")


def test_calls_return_text_and_no_exception_crosses(node: RayInstanceHost) -> None:
    done, text = answer(node, "seat", encode(_CPU))
    assert (done, decode(Seat, text).ip) == (True, "127.0.0.1")

    done, text = answer(node, "seat", encode(NodeRequest("cpu", ("0",), "9.9")))
    assert (done, decode(RemoteFailure, text).error) == (False, "Incompatible")
    done, text = answer(node, "seat", "{")
    assert (done, decode(RemoteFailure, text).error) == (False, "InternalError")
    done, text = answer(node, "news", encode(Look(0, None)))
    assert (done, decode(RemoteFailure, text).error) == (False, "InternalError")
