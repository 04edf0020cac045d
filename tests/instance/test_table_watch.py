"""An instance follows its global table: its peers, its digest, and its own end once its entry is removed."""

import asyncio
import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from instance.entry_lock import EntryLock
from instance.table_watch import DRAIN_S, LET_GO_S, EntryWatch, Stage, stage
from ranktable_tools.digest import table_digest
from ranktable_tools.launch_plan import resolve
from ranktable_tools.table_file import read_global
from ranktable_tools.watched_table import WatchedTable
from security.trust import find_trust
from tests.instance.pair import DEADLINE_S, Client, instance_config, running
from wire.errors import ConfigError, Unavailable
from wire.messages import Generate, OpenSession, Refused, RoleHeld, SetRole, Step, TableRead
from wire.types import PromptState, Role, SamplingParams

Document = dict[str, Any]
STATE = PromptState("r/0", "r", (3, 4, 5), SamplingParams(max_tokens=2, temperature=0.0))


def _server(host: int, device: str | None = "0", port: int | None = None) -> Document:
    ip = f"192.0.2.{host}"
    entry: Document = {"server_id": ip, "server_ip": ip}
    if device is not None:
        entry["device"] = [{"device_id": device, "device_ip": ip, "rank_id": "0"}]
    return entry if port is None else {**entry, "server_port": str(port)}


def table(*decode: Document) -> Document:
    """A table of the scheduler and a prefill instance on 192.0.2.1, and these decode instances."""
    groups = [[_server(1, None)], [_server(1)], list(decode)]
    listed = [
        {"group_id": str(number), "server_count": str(len(servers)), "server_list": servers}
        for number, servers in enumerate(groups)
    ]
    return {"version": "1.0", "status": "completed", "server_group_list": listed}


OWN, OTHER = _server(2, port=8089), _server(3, port=8090)


class FakeHost:
    """The state that an instance reports, and the values that the watch sets."""

    def __init__(self) -> None:
        self.table_digest, self.in_session, self.is_busy = "", True, False
        self.draining: str | None = None

    def use_table(self, digest: str) -> None:
        self.table_digest = digest

    def drain(self, why: str | None) -> None:
        self.draining = why


class Followed:
    """A watch of decode instance 192.0.2.2, and the file that it follows."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.path = folder / "global.json"
        self.path.write_text(json.dumps(table(OWN)))
        local = folder / "local.json"
        document = copy.deepcopy(table(OWN)["server_group_list"][2]) | {"group_id": "0"}
        local.write_text(json.dumps({"version": "1.0", "status": "completed", **document}))
        named = {"GLOBAL_RANK_TABLE_FILE_PATH": str(self.path), "RANK_TABLE_FILE_PATH": str(local)}
        self.plan = resolve({**named, **environ})
        self.host, self.held = FakeHost(), list[str]()
        self.trust = find_trust({}, str(self.path), ["192.0.2.1", "192.0.2.2"])
        self.watch = EntryWatch(self.plan, self.host, self.trust, self.held.append, poll_s=0.005)
        self._file = WatchedTable(str(self.path), self.watch.read)
        self.read(table(OWN), 0.0)

    def write(self, document: object) -> None:
        """Replace the file by a rename."""
        temporary = self.path.with_suffix(".new")
        temporary.write_text(document if isinstance(document, str) else json.dumps(document))
        temporary.replace(self.path)

    def read(self, document: object, now: float) -> Stage:
        """Replace the file and read it until it is accepted; return the stage at `now`."""
        self.write(document)
        for _ in range(3):
            self.watch.take(self._file.poll(), now)
        return self.watch.advance(now)


@pytest.mark.parametrize(
    ("gone_s", "in_session", "is_busy", "left"),
    [
        (None, True, True, Stage.BELONGS),
        (None, False, False, Stage.BELONGS),
        (0.0, False, False, Stage.ENDS),
        (0.0, True, False, Stage.WORKS_ON),
        (LET_GO_S - 1, True, True, Stage.WORKS_ON),
        (LET_GO_S, True, True, Stage.REFUSES),
        (LET_GO_S, True, False, Stage.ENDS),
        (LET_GO_S + DRAIN_S, True, True, Stage.ENDS),
    ],
)
def test_a_removed_entry_passes_through_its_stages(
    gone_s: float | None, in_session: bool, is_busy: bool, left: Stage
) -> None:
    assert stage(gone_s, in_session=in_session, is_busy=is_busy) is left


def test_a_new_table_brings_its_digest_peers_and_own_entry(tmp_path: Path) -> None:
    followed = Followed(tmp_path)

    left = followed.read(table(OWN, OTHER), 1.0)

    assert left is Stage.BELONGS
    assert followed.host.table_digest == table_digest(read_global(str(followed.path)))
    assert followed.host.table_digest != followed.plan.table_digest
    assert followed.held == [followed.plan.table_digest, followed.host.table_digest]
    assert followed.trust.has_address("192.0.2.3")


def test_removed_hosts_stay_peers_while_instances_drain(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.read(table(OWN, OTHER), 1.0)

    followed.read(table(OWN), 2.0)
    assert followed.trust.has_address("192.0.2.3")
    followed.watch.advance(3.0 + LET_GO_S + DRAIN_S)

    assert not followed.trust.has_address("192.0.2.3")
    assert followed.trust.has_address("192.0.2.1")


def test_a_removed_entry_ends_the_instance_once_the_session_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    followed = Followed(tmp_path)
    caplog.set_level(logging.INFO, "pdserve.table")

    assert followed.read(table(OTHER), 1.0) is Stage.WORKS_ON
    assert followed.host.draining is None
    followed.host.in_session = False
    assert followed.watch.advance(2.0) is Stage.ENDS

    gone, last = (message for message in caplog.messages if not message.startswith("table_changed"))
    assert gone.startswith("table_entry_removed ")
    assert last.startswith("instance_stopping ")
    words = f"decode-0 (192.0.2.2, devices 0) is gone from the global table {followed.path}"
    assert words in gone
    assert words in last


def test_a_removed_instance_refuses_new_work_and_finishes_its_own(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.host.is_busy = True
    followed.read(table(OTHER), 1.0)

    assert followed.watch.advance(1.0 + LET_GO_S) is Stage.REFUSES
    assert followed.host.draining is not None
    assert "is gone from the global table" in followed.host.draining
    followed.host.is_busy = False

    assert followed.watch.advance(2.0 + LET_GO_S) is Stage.ENDS


def test_an_entry_that_comes_back_keeps_its_instance(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.host.is_busy = True
    followed.read(table(OTHER), 1.0)
    followed.watch.advance(1.0 + LET_GO_S)

    assert followed.read(table(OWN, OTHER), 2.0 + LET_GO_S) is Stage.BELONGS
    assert followed.host.draining is None
    assert followed.read(table(OTHER), 3.0 + LET_GO_S) is Stage.WORKS_ON


@pytest.mark.parametrize("document", ["{", json.dumps({**table(OTHER), "status": "initializing"})])
def test_an_unusable_table_ends_no_instance(tmp_path: Path, document: str) -> None:
    followed = Followed(tmp_path)

    assert followed.read(document, 1.0) is Stage.BELONGS
    assert followed.host.table_digest == followed.plan.table_digest


def test_a_table_restored_unchanged_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(tmp_path)
    followed.read(table(OWN, OTHER), 1.0)
    followed.read(table(OWN), 2.0)  # 192.0.2.3 drains
    caplog.set_level(logging.INFO, "pdserve.table")

    for document in ("{", table(OWN), table(OWN)):
        followed.read(document, 3.0)

    (_, again) = caplog.messages
    assert again == f"table_valid_again digest={followed.plan.table_digest}"
    assert followed.trust.has_address("192.0.2.3")


def test_another_device_address_is_another_entry(tmp_path: Path) -> None:
    other = copy.deepcopy(OWN)
    other["device"][0]["device_ip"] = "192.0.2.99"

    assert Followed(tmp_path).read(table(other), 1.0) is Stage.WORKS_ON


@pytest.mark.parametrize(
    ("environ", "port", "left"),
    [
        ({}, 8091, Stage.WORKS_ON),
        ({}, None, Stage.BELONGS),
        ({"NODE_PORTS": "1,2"}, 8091, Stage.BELONGS),
    ],
)
def test_another_port_is_another_entry_unless_node_ports_sets_it(
    tmp_path: Path, environ: dict[str, str], port: int | None, left: Stage
) -> None:
    followed = Followed(tmp_path, **environ)

    assert followed.read(table(_server(2, port=port)), 1.0) is left


def test_a_changed_role_ends_no_instance(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    changed = table(OTHER)
    changed["server_group_list"][1]["server_list"].append(OWN)
    changed["server_group_list"][1]["server_count"] = "2"

    assert followed.read(changed, 1.0) is Stage.BELONGS


def test_the_file_is_read_until_the_instance_ends(tmp_path: Path) -> None:
    async def run() -> str:
        followed = Followed(tmp_path)
        followed.host.in_session = False
        running_ = asyncio.create_task(followed.watch.run())
        followed.write(table(OTHER))
        async with asyncio.timeout(DEADLINE_S):
            return await running_

    assert "decode-0 (192.0.2.2, devices 0) is gone from the global table" in asyncio.run(run())


def test_a_draining_instance_refuses_new_work_and_finishes_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (instance, client):
            host = instance._host
            assert host.in_session
            assert not host.is_busy
            long = PromptState("r/1", "r", (3, 4, 5), SamplingParams(max_tokens=100, temperature=0.0))
            await client.session.send(Generate(long))
            await client.next(Step)
            host.drain("its entry is gone")
            await client.session.send(Generate(STATE))
            refused, ended = None, False
            while refused is None or not ended:  # in either order: the engine does not wait for the refusal
                event = await client.next(Step, Refused)
                if isinstance(event, Refused):
                    refused = event
                elif isinstance(event, Step):
                    ended = ended or any(token.finish for token in event.tokens)
            assert (refused.prompt_id, refused.error, refused.message) == ("r/0", "Draining", "its entry is gone")
            with pytest.raises(Unavailable, match="its entry is gone"):
                await instance.connection().open(OpenSession("test", 2, 10.0), DEADLINE_S)
            host.drain(None)
            await client.session.send(Generate(STATE))
            await client.next(Step)

    asyncio.run(run())


def test_the_scheduler_gets_the_table_at_start_and_each_change_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (instance, client):
            host = instance._host
            for digest in ("", "one", "one", "two"):
                host.use_table(digest)

            read = [await client.next(TableRead) for _ in range(3)]
            assert read == [TableRead(""), TableRead("one"), TableRead("two")]
            assert host.describe().table_digest == "two"

    asyncio.run(run())


def test_a_role_and_its_epoch_outlive_the_session_and_an_old_epoch(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(instance_config(tmp_path, Role.DECODE, port=4)) as (instance, old):
            await old.session.send(SetRole(Role.PREFILL, 3), SetRole(Role.COMBINED, 3))
            held = [await old.next(RoleHeld) for _ in range(3)]
            await old.session.close()
            client = Client(await instance.connection().open(OpenSession("test", 2, DEADLINE_S), DEADLINE_S))

            older = "role epoch 3 is not above 3, the epoch of its role prefill"
            assert held == [RoleHeld(Role.DECODE, 0), RoleHeld(Role.PREFILL, 3, 3), RoleHeld(Role.PREFILL, 3, 3, older)]
            assert await client.next(RoleHeld) == RoleHeld(Role.PREFILL, 3)
            await client.session.close()

    asyncio.run(run())


def test_a_table_changed_before_the_session_opens_is_reported(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(instance_config(tmp_path, Role.COMBINED, port=4)) as (instance, old):
            await old.session.close()
            described = await instance.connection().describe(DEADLINE_S)
            instance._host.use_table("one")
            client = Client(await instance.connection().open(OpenSession("test", 2, DEADLINE_S), DEADLINE_S))

            assert described.table_digest == ""
            assert await client.next(TableRead) == TableRead("one")
            await client.session.close()

    asyncio.run(run())


def test_an_entry_stays_locked_for_each_table_in_use(tmp_path: Path) -> None:
    place = (str(tmp_path), ("0",))
    lock = EntryLock("one", *place)
    lock.hold("two")
    lock.hold("two")

    for digest in ("one", "two"):
        with pytest.raises(ConfigError, match="holds it"):
            EntryLock(digest, *place)
    lock.close()
    EntryLock("two", *place).close()
