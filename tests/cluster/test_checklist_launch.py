"""Lines 97 to 115 of the checklist that need a running cluster: roles, forms of flags, limits, any order."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.conftest import ENGINE_FLAGS
from tests.cluster.guide import GuideCluster

pytestmark = pytest.mark.cluster

FAKE = ("--engine=fake",)


def _body(prompt: object, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


@pytest.mark.long
@pytest.mark.covers("A7.97", "A8.99", "A8.115")
def test_one_launcher_starts_three_roles_with_flags_in_both_forms(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, flags=FAKE) as cluster:
        cluster.start("scheduler", flags=("--startup-timeout", "60"))
        cluster.start("decode-0", flags=("--max-num-seqs=4", "--max-model-len", "256"))
        cluster.start("prefill-0", flags=("--max-num-seqs", "4", "--max-model-len=256"))
        cluster.wait_ready()

        assert cluster.client.post("/v1/completions", _body("hello")).status == 200
        output = {name: process.log.splitlines()[0] for name, process in cluster.processes.items()}

    assert output["scheduler"].startswith("this process is the scheduler (")
    for name, (role, devices) in {"prefill-0": ("prefill", "4,5"), "decode-0": ("decode", "6,7")}.items():
        assert output[name].startswith("this process is ")
        assert role in output[name]
        assert output[name].endswith(f", devices {devices})")


@pytest.mark.covers("A8.110", "A8.111")
@pytest.mark.long
def test_sequences_and_lengths_are_bounded(tmp_path: Path, fake_model: Path) -> None:
    limits = ("--max-num-seqs=2", "--max-model-len=64", "--max-num-batched-tokens=64")
    with GuideCluster(tmp_path, fake_model, flags=(*FAKE, *limits)) as cluster:
        cluster.up()
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda at: cluster.client.post("/v1/completions", _body([5, at])), range(6)))
        too_long = cluster.client.post("/v1/completions", _body([5] * 65))
        at_the_limit = cluster.client.post("/v1/completions", _body([5] * 60, max_tokens=4))
        cluster.wait_idle()

    assert [answer.status for answer in answers] == [200] * 6
    assert too_long.status == 400
    assert "64" in too_long.body.decode()
    assert at_the_limit.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.covers("A8.103")
@pytest.mark.long
def test_swapped_ports_of_two_prefill_instances_are_found(tmp_path: Path, fake_model: Path) -> None:
    with GuideCluster(tmp_path, fake_model, prefill=("0", "1"), decode=("2", "3"), flags=FAKE) as cluster:
        cluster.start(*cluster.names)
        first, second, *decode = map(str, cluster.ports)

        scheduler = cluster.start("scheduler", env={"NODE_PORTS": ",".join((second, first, *decode))})
        status = scheduler.wait()
        del cluster.processes["scheduler"]

    assert status == 2
    last = scheduler.log.splitlines()[-1]
    assert "devices 0" in last
    assert "devices 1" in last


@pytest.mark.covers("A8.109")
@pytest.mark.long
def test_a_second_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with GuideCluster(tmp_path, tiny_model, flags=ENGINE_FLAGS) as cluster:
        cluster.start("prefill-0")
        cluster.start("decode-0", flags=("--model", str(other)))

        scheduler = cluster.start("scheduler")
        status = scheduler.wait()
        del cluster.processes["scheduler"]

    assert status == 2
    assert "model" in scheduler.log.splitlines()[-1]
