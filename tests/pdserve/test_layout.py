"""A cluster laid out on this machine: tables that resolve, different ports, its own environment."""

from pathlib import Path

import pytest

from pdserve.layout import ClusterShape, environment, lay_out
from pdserve.membership import TableMembership
from pdserve.running_workers import NO_WORKERS, running_workers
from ranktable_tools.launch_plan import resolve
from wire.errors import ConfigError


@pytest.fixture
def shape() -> ClusterShape:
    return ClusterShape(2, 1, "127.0.0.1", 9000, ("--model", "/m"))


def test_every_process_resolves_to_its_role_and_port(tmp_path: Path, shape: ClusterShape) -> None:
    plans = lay_out(shape, tmp_path)

    resolved = [resolve(environment(plan, {})) for plan in plans]
    assert [plan.name for plan in plans] == ["prefill-0", "prefill-1", "decode-0", "scheduler"]
    assert [entry.role for entry in resolved] == ["prefill", "prefill", "decode", "scheduler"]
    addresses = [f"{peer.host}:{peer.port}" for peer in resolved[-1].instance_addresses]
    assert addresses == [plan.address for plan in plans[:-1]]
    assert len(set(addresses)) == 3
    assert plans[-1].command[-6:] == ("--host", "127.0.0.1", "--port", "9000", "--model", "/m")


def test_workers_of_another_engine_have_flags_and_ports_of_their_own(tmp_path: Path) -> None:
    shape = ClusterShape(1, 1, "h", 9000, ("--kv-digests",), worker="vllm", worker_flags=("--model", "/m"))
    *workers, scheduler = lay_out(shape, tmp_path)

    assert [plan.command[-2:] for plan in workers] == [("--model", "/m")] * 2
    assert scheduler.command[-1] == "--kv-digests"
    assert [plan.env.get("PDSERVE_WORKER") for plan in (*workers, scheduler)] == ["vllm", "vllm", None]
    assert all(plan.address.startswith("http://127.0.0.1:") for plan in workers)
    assert all(TableMembership().has(plan) for plan in workers)
    assert len({plan.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for plan in workers}) == 2
    assert {resolve(environment(plan, {})).own.worker for plan in workers} == {"vllm"}


@pytest.mark.parametrize(("num_running", "is_set"), [(0, True), (1, False)], ids=["alone", "beside running ones"])
def test_the_scheduler_knows_the_workers_bootstrap_port(tmp_path: Path, num_running: int, is_set: bool) -> None:
    urls = ["http://h:1"] * num_running
    running = running_workers(urls, ["http://h:2"], [], "mooncake") if urls else NO_WORKERS
    shape = ClusterShape(1, 1, "h", 9000, (), worker="vllm", worker_flags=("--model", "/m"), running=running)
    prefill, _, scheduler = lay_out(shape, tmp_path)

    ports = [plan.env.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") for plan in (prefill, scheduler)]
    assert ports[0] == ports[1]
    assert (ports[0] is not None) is is_set


@pytest.mark.parametrize("num_own", [0, 1])
def test_workers_that_run_already_are_members_beside_the_instances(tmp_path: Path, num_own: int) -> None:
    running = running_workers(["http://h:1"], ["http://h:2"], ["http://h:3"], "auto")
    shape = ClusterShape(num_own, num_own, "127.0.0.1", 9000, ("--model", "/m"), running=running)

    *instances, scheduler = lay_out(shape, tmp_path)

    assert [plan.name for plan in instances] == ["prefill-0", "decode-0"][: 2 * num_own]
    assert [TableMembership().has(plan) for plan in instances] == [True] * len(instances)
    addresses = resolve(environment(scheduler, {})).instance_addresses
    listed = {one.name: f"{one.host}:{one.port}" for one in addresses if one.server.url is not None}
    assert listed == {f"prefill-{num_own}": "h:1", "combined-0": "h:3", f"decode-{num_own}": "h:2"}


def test_an_instance_has_a_device_for_each_of_its_ranks(tmp_path: Path) -> None:
    plans = lay_out(ClusterShape(1, 2, "127.0.0.1", 9000, ("--model", "/m"), num_ranks=2), tmp_path)

    owned = [resolve(environment(plan, {})).own.device_ids for plan in plans[:-1]]
    assert owned == [("0", "1"), ("2", "3"), ("4", "5")]


def test_cards_of_a_preset_variable_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3, 7,5")
    flags = ("--model", "/m", "--device", "cuda")

    def shown(num_prefill: int, num_decode: int, num_ranks: int, device: str) -> list[str | None]:
        plans = lay_out(ClusterShape(num_prefill, num_decode, "h", 9000, flags, device, num_ranks), tmp_path)
        return [plan.env.get("CUDA_VISIBLE_DEVICES") for plan in plans]

    assert shown(1, 1, 2, "cuda") == ["2,3", "7,5", None]
    assert shown(2, 1, 1, "cuda") == ["2", "3", "7", None]
    assert shown(3, 3, 1, "cuda") == ["2", "3", "7", "5", "2", "3", None]
    assert shown(1, 1, 1, "cpu") == [None, None, None]
    with pytest.raises(ConfigError, match=r"'2,3, 7,5' lists 4 cards, but 2 instances of 5 ranks need at least 5"):
        shown(1, 1, 5, "cuda")


@pytest.mark.parametrize("preset", ["", "-1", "6"])
@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_auto_hides_all_cards_if_the_variable_has_too_few(
    kind: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}[kind]
    monkeypatch.setattr("pdserve.preset_cards.find_kind", lambda dev: kind)
    monkeypatch.setenv(variable, preset)

    plans = lay_out(ClusterShape(1, 1, "h", 9000, ("--engine", "fake")), tmp_path)

    assert [plan.env.get(variable) for plan in plans] == ["", "", None]


def test_auto_shares_the_cards_out_if_there_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.preset_cards.find_kind", lambda dev: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4")

    plans = lay_out(ClusterShape(1, 1, "h", 9000, ()), tmp_path)

    assert [plan.env.get("CUDA_VISIBLE_DEVICES") for plan in plans] == ["6", "4", None]


def test_npus_of_a_preset_variable_are_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6")

    with pytest.raises(ConfigError, match=r"'6' lists 1 card, but 2 instances of 1 rank need 2: "):
        lay_out(ClusterShape(1, 1, "h", 9000, (), "npu"), tmp_path)


def test_the_secret_is_beside_the_table_with_mode_0600(tmp_path: Path, shape: ClusterShape) -> None:
    lay_out(shape, tmp_path)

    assert (tmp_path / "cluster_secret").stat().st_mode & 0o777 == 0o600


def test_variables_of_another_cluster_are_not_passed_on(tmp_path: Path, shape: ClusterShape) -> None:
    plan = lay_out(shape, tmp_path)[0]

    made = environment(plan, {"NODE_PORTS": "1,2", "RANK_TABLE_FILE_PATH": "/else", "KEPT": "1"})

    assert "NODE_PORTS" not in made
    assert made["KEPT"] == "1"
    assert made["RANK_TABLE_FILE_PATH"].startswith(str(tmp_path))


def test_errors_name_the_flag() -> None:
    from pdserve.up_request import parse

    with pytest.raises(ConfigError, match="--prefill 0"):
        parse(["--prefill", "0", "--model", "/m"])
    with pytest.raises(ConfigError, match="--port 0"):
        parse(["--port", "0", "--model", "/m"])
    with pytest.raises(ConfigError, match="--node-ports is set by"):
        parse(["--node-ports", "1,2", "--model", "/m"])


def test_typed_flags_reach_every_process_unchanged() -> None:
    from pdserve.up_request import parse

    request = parse(
        [
            "--model",
            "/m",
            "--served-model-name",
            "a",
            "b",
            "--kv-cache-memory=1MiB",
            "--stall-timeout",
            "5",
            "--host",
            "::1",
        ]
    )

    assert request.flags == (
        "--model", "/m", "--served-model-name", "a", "b", "--kv-cache-memory", "1048576", "--stall-timeout", "5.0",
    )  # fmt: skip
    assert request.base_url == "http://[::1]:9000"


def test_several_schedulers_have_names_and_ports_of_their_own(tmp_path: Path) -> None:
    flags = ("--model", "/m", "--roles", "auto")
    *instances, first, second = lay_out(ClusterShape(1, 1, "h", 9000, flags, scheduler_ports=(9001, 9002)), tmp_path)

    assert [plan.role for plan in instances] == ["prefill", "decode"]
    assert [(plan.name, plan.role, plan.address) for plan in (first, second)] == [
        ("scheduler-0", "scheduler", "h:9001"), ("scheduler-1", "scheduler", "h:9002"),
    ]  # fmt: skip
    assert first.command[-6:] == ("--port", "9001", *flags)
    assert second.command[-2:] == ("--roles", "fixed"), "one alone lets roles follow the load"
    assert resolve(environment(second, {})).role == "scheduler"
