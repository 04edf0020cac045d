"""The scheduler follows changes of its table's file."""

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from ranktable_tools.launch_plan import LaunchPlan, resolve
from ranktable_tools.watched_table import WatchedTable
from scheduler.limits import ControlLimits
from scheduler.membership.entries import Entries
from scheduler.registry import Registry
from scheduler.table_watch import TableWatch
from testing.wire.fake_network import FakeNetwork

pytestmark = pytest.mark.anyio
WAIT_S = 300.0
Document = dict[str, Any]


def _server(host: int, port: int | None = None, *, device: bool = True) -> Document:
    ip = f"192.0.2.{host}"
    entry: Document = {"server_id": ip, "server_ip": ip}
    if device:
        entry["device"] = [{"device_id": "0", "device_ip": ip, "rank_id": "0"}]
    return entry if port is None else {**entry, "server_port": str(port)}


def table(*decode: Document, scheduler: int = 1, **changes: object) -> Document:
    """A table of one prefill instance, on 192.0.2.2, and these decode instances."""
    groups = [_group(0, _server(scheduler, device=False)), _group(1, _server(2, 8088)), _group(2, *decode)]
    return {"version": "1.0", "status": "completed", "server_group_list": groups, **changes}


def _group(number: int, *servers: Document) -> Document:
    return {"group_id": str(number), "server_count": str(len(servers)), "server_list": list(servers)}


class Followed:
    """A registry and the file that it follows."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self._path = folder / "global.json"
        self.write(table(_server(3, 8089)))
        local = folder / "host.json"
        local.write_text(json.dumps({"version": "1.0", "status": "completed", **_group(0, _server(1, device=False))}))
        named = {"GLOBAL_RANK_TABLE_FILE_PATH": str(self._path), "RANK_TABLE_FILE_PATH": str(local)}
        self.plan: LaunchPlan = resolve({**named, **environ})
        self.registry = Registry(
            Entries(self.plan).expected, FakeNetwork().connect, table_digest=self.plan.table_digest, scheduler_id="s",
            epoch=1, limits=ControlLimits(), rng=random.Random(0),
        )  # fmt: skip
        self.watch = TableWatch(self.plan, self.registry, poll_s=0.005)
        self._file = WatchedTable(str(self._path), self.watch._read, self.plan.global_table)

    def write(self, document: object) -> None:
        """Replace the file by a rename."""
        beside = self._path.with_suffix(".new")
        beside.write_text(document if isinstance(document, str) else json.dumps(document))
        beside.replace(self._path)

    def read(self, document: object) -> None:
        """Replace the file and look as often as needed, without the loop."""
        self.write(document)
        for _ in range(3):
            self.watch.take(self._file.poll())

    @property
    def names(self) -> list[str]:
        """The names of the members."""
        return [f"{one.expected.name} {one.expected.address}" for one in self.registry.members]

    async def until(self, version: int) -> None:
        """Return when the registry uses this version."""
        async with asyncio.timeout(WAIT_S):
            while self.registry.table.version < version:  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.005)


def test_a_broken_table_is_logged_once_and_the_last_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(tmp_path)
    caplog.set_level(logging.INFO, "pdserve.table")
    more = table(_server(3, 8089), _server(4, 8090))

    for document in (json.dumps(more)[:100], {**more, "status": "initializing"}, table(_server(5, 1), scheduler=9)):
        followed.read(document)

    half, waits, other = caplog.messages
    assert half.startswith("table_ignored ")
    assert "not JSON" in half
    assert f"version=1 digest={followed.plan.table_digest}" in half
    assert waits.startswith("table_not_ready ")
    assert "initializing" in waits
    assert "this scheduler is 192.0.2.1; to move the scheduler, stop this one and start the other" in other
    assert followed.registry.table.version == 1
    assert len(followed.names) == 2


@pytest.mark.parametrize("other", [{}, {"hardware_type": "800I-A2-32G"}])
def test_a_table_restored_unchanged_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: Document
) -> None:
    followed = Followed(tmp_path)
    caplog.set_level(logging.INFO, "pdserve.table")

    for document in ("{", table(_server(3, 8089), **other), table(_server(3, 8089), **other)):
        followed.read(document)

    (_, again) = caplog.messages
    assert again == f"table_valid_again version=1 digest={followed.plan.table_digest}"


def test_a_change_is_logged_with_version_digest_and_sentences(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(tmp_path)
    caplog.set_level(logging.INFO, "pdserve")

    followed.read(table(_server(4, 8090)))

    digest = followed.registry.table.digest
    assert digest != followed.plan.table_digest
    first = next(message for message in caplog.messages if message.startswith("table_changed"))
    assert f"version=2 digest={digest}" in first
    assert "moves to 192.0.2.4" in first
    assert any(message.startswith("instance_added") and "decode-1" in message for message in caplog.messages)


def test_a_table_with_equal_meaning_is_not_a_new_version(tmp_path: Path) -> None:
    followed = Followed(tmp_path)

    followed.read(table(_server(3, 8089), hardware_type="800I-A2-32G"))

    assert followed.registry.table.version == 1


def test_a_later_entry_without_a_port_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    followed = Followed(tmp_path, NODE_PORTS="9088,9089")

    followed.read(table(_server(3, 8089), _server(4)))

    assert followed.names == ["prefill-0 192.0.2.2:9088", "decode-0 192.0.2.3:9089"]
    (reported,) = [message for message in caplog.messages if message.startswith("instance_left_out")]
    assert "decode instance on 192.0.2.4 is left out" in reported


async def test_the_file_is_watched_forever_despite_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(tmp_path)
    failed, follow = asyncio.Event(), followed.watch._follow_table

    def fails_once(found: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        follow(found)

    monkeypatch.setattr(followed.watch, "_follow_table", fails_once)
    watching = asyncio.create_task(followed.watch.run())
    followed.write(table(_server(4, 8090)))
    async with asyncio.timeout(WAIT_S):
        await failed.wait()
    followed.write(table(_server(5, 8090)))
    await followed.until(2)

    watching.cancel()
    assert followed.names[1:] == ["decode-1 192.0.2.5:8090"]
