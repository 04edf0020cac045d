"""The doctor's checks of cores and cards, over recorded tool outputs."""

from pathlib import Path

import pytest

from ranktable_tools.doctor.cards import check_card_health, check_card_users, check_cards
from ranktable_tools.doctor.cores import check_cores
from tests.ranktable_tools import recorded
from tests.ranktable_tools.bench import HERE, Bench, server, tables

GPUS = "0, GPU-aa, NVIDIA H200, 570.86.15, 1024, 143771\n1, GPU-bb, NVIDIA H200, 570.86.15, 0, 143771\n"
GPU_QUERY = "--query-gpu=index,uuid,name,driver_version,memory.used,memory.total --format=csv,noheader,nounits"
USER_QUERY = "--query-compute-apps=gpu_uuid,pid,used_memory,process_name --format=csv,noheader,nounits"


@pytest.fixture
def a2(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, "davinci0", "davinci1", "davinci_manager")
    bench.tool("npu-smi", {"info": recorded.INFO_A2})
    return bench


@pytest.fixture
def a3(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, *(f"davinci{number}" for number in range(4)))
    bench.tool("npu-smi", {"info": recorded.INFO_A3})
    return bench


@pytest.fixture
def gpus(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, "nvidia0", "nvidia1", "nvidiactl")
    bench.tool("nvidia-smi", {GPU_QUERY: GPUS, USER_QUERY: "GPU-bb, 4711, 900, /usr/bin/python3\n"})
    return bench


def test_the_tables_cards_exist_on_the_machine(a2: Bench) -> None:
    verdict = check_cards(a2.case(tables([server(HERE, "0")], [server(HERE, "1")])))

    assert (verdict.result, verdict.message) == ("ok", "npu 0,1: 2 x 910B4")


def test_cards_of_the_table_missing_on_the_machine_are_a_failure(a2: Bench) -> None:
    verdict = check_cards(a2.case(tables([server(HERE, "4,5")], [server(HERE, "0,1")])))

    assert (verdict.result, verdict.message) == ("fail", "the table has the cards 4,5, but this host has 0,1")
    assert verdict.next_step == "docker run --device=/dev/davinci4"


def test_without_npu_smi_the_next_step_is_to_mount_it(tmp_path: Path) -> None:
    verdict = check_cards(Bench(tmp_path, "davinci0").case())

    assert (verdict.result, verdict.message) == ("fail", "npu-smi is not found")
    assert "mount npu-smi and /usr/local/Ascend/driver" in verdict.next_step


def test_an_npu_smi_that_lists_nothing_is_quoted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "davinci0")
    bench.tool("npu-smi", {}, other="dcmi model initialized failed, because the device is used. ret is -8020\n")

    for check in (check_cards, check_card_health):
        verdict = check(bench.case())
        assert verdict.result == "fail"
        assert "info: dcmi model initialized failed, because the device is used. ret is -8020" in verdict.message


def test_gpus_are_listed_with_their_names(gpus: Bench) -> None:
    assert check_cards(gpus.case()).message == "cuda 0,1: 2 x NVIDIA H200"


def test_a_card_that_is_not_ok_is_named_by_its_physical_id(a3: Bench) -> None:
    verdict = check_card_health(a3.case())

    assert (verdict.result, verdict.message) == ("fail", "card 3 is Alarm")
    assert verdict.next_step == "npu-smi info -t health -i 1 -c 1"


def test_the_state_of_cards_outside_the_table_does_not_matter(a3: Bench) -> None:
    verdict = check_card_health(a3.case(tables([server(HERE, "0")], [server(HERE, "1,2")])))

    assert (verdict.result, verdict.message) == ("ok", "3 cards OK")


def test_an_unrelated_process_on_a_card_is_named(a2: Bench) -> None:
    verdict = check_card_users(a2.case())

    assert (verdict.result, verdict.message) == ("warn", "card 1 is used by python3 (pid 51544, 58955 MB)")


def test_an_unrelated_process_on_a_gpu_is_named(gpus: Bench) -> None:
    verdict = check_card_users(gpus.case())

    assert (verdict.result, verdict.message) == ("warn", "card 1 is used by /usr/bin/python3 (pid 4711, 900 MB)")


def test_our_own_processes_are_not_foreign(a2: Bench) -> None:
    a2.file("/proc/51544/cmdline", "python3\0-P\0-m\0pdserve.launch\0--port\08088\0")

    verdict = check_card_users(a2.case())

    assert (verdict.result, verdict.message) == ("ok", "1 process of pdserve")


def test_users_of_other_cards_do_not_matter(a2: Bench) -> None:
    own = server(HERE, "0")

    verdict = check_card_users(a2.case(tables([own], [server(HERE, "1")], local=own)))

    assert (verdict.result, verdict.message) == ("ok", "no process uses the cards")


def test_in_a_container_pids_are_the_containers(a3: Bench) -> None:
    a3.file("/.dockerenv", "")
    a3.file("/proc/412/cmdline", "python\0-m\0pdserve.launch\0")

    verdict = check_card_users(a3.case())

    assert (verdict.result, verdict.message) == ("warn", "card 0 is used by VLLMWorker_DP (34309 MB)")


def test_a_machine_without_cards_has_nothing_to_check(tmp_path: Path) -> None:
    case = Bench(tmp_path).case()

    assert {check(case).result for check in (check_cards, check_card_health, check_card_users)} == {"not here"}


@pytest.mark.parametrize(
    ("ids", "cores", "result", "words"),
    [
        (("0", "1"), 2, "ok", "2 cores for 2 device ids"),
        (("4,5", "6,7"), 2, "warn", "2 cores for 4 device ids, fewer than one each"),
        (("0", "0"), 1, "ok", "1 core for 1 device id"),
    ],
)
def test_device_ids_share_cores_if_there_are_too_few(
    tmp_path: Path, ids: tuple[str, str], cores: int, result: str, words: str
) -> None:
    given = tables([server(HERE, ids[0])], [server(HERE, ids[1])])

    verdict = check_cores(Bench(tmp_path).case(given, cores=cores))

    assert (verdict.result, verdict.message) == (result, words)


def test_a_containers_quota_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.file("/sys/fs/cgroup/cpu.max", "150000 100000\n")

    verdict = check_cores(bench.case(tables([server(HERE, "0")], [server(HERE, "1")]), cores=16))

    words = "16 cores with a quota of 1.5 for 2 device ids, fewer than one each"
    assert (verdict.result, verdict.message) == ("warn", words)
