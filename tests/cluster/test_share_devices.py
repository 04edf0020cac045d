"""Two instances of one device: refused with a message, and started if every process has --share-devices."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.ports import free_ports
from ranktable_tools.commands import GenArguments, gen
from tests.cluster.guide import GuideCluster, Tables

pytestmark = pytest.mark.cluster

FAKE = ("--engine=fake",)


def _shared(folder: Path, model: Path, flags: Sequence[str]) -> GuideCluster:
    """1P1D whose two instances have device 0."""
    ports = free_ports(2)
    wanted = GenArguments(
        ["0"], ["0"], True, str(folder), "127.0.0.1", ",".join(map(str, ports)), "cpu", share_devices=True
    )
    made = gen(wanted, lambda line: None, {})
    tables = Tables(folder / made.global_name, tuple(folder / local.file_name for local in made.locals))
    cluster = GuideCluster(folder, model, prefill=("0",), decode=("0",), tables=tables, flags=flags)
    cluster.ports[:] = ports
    return cluster


@pytest.mark.parametrize("name", ["prefill-0", "scheduler"])
def test_one_device_in_two_instances_ends_them_naming_the_flag(tmp_path: Path, fake_model: Path, name: str) -> None:
    with _shared(tmp_path, fake_model, FAKE) as cluster:
        process = cluster.start(name)
        status = process.wait()
        del cluster.processes[name]

    assert status == 2
    last = process.log.splitlines()[-1]
    assert "A device_id can be used only once in prefill server and decode server." in last
    assert last.endswith("Two instances may share a GPU if every process is started with --share-devices")


@pytest.mark.long
def test_two_instances_share_a_device_if_every_process_allows_it(tmp_path: Path, fake_model: Path) -> None:
    with _shared(tmp_path, fake_model, (*FAKE, "--share-devices")) as cluster:
        cluster.up()
        reply = cluster.client.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4})
        cluster.wait_idle()
        roles = {name: process.log.splitlines()[0] for name, process in cluster.processes.items()}

    assert reply.status == 200, reply.body
    assert roles["prefill-0"] == "this process is prefill-0 (127.0.0.1, devices 0)"
    assert roles["decode-0"] == "this process is decode-0 (127.0.0.1, devices 0)"


def test_an_npu_is_never_shared(tmp_path: Path, fake_model: Path) -> None:
    with _shared(tmp_path, fake_model, (*FAKE, "--share-devices", "--device=npu")) as cluster:
        process = cluster.start("decode-0")
        status = process.wait()
        del cluster.processes["decode-0"]

    assert status == 2
    assert "--share-devices is for GPUs" in process.log.splitlines()[-1]
