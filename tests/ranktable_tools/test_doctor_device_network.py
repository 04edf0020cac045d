"""The doctor's checks of the network between NPUs: links, TLS switches and pairs."""

from dataclasses import replace
from pathlib import Path

import pytest

from ranktable_tools.doctor.device_network import (
    MAX_PINGS,
    check_device_links,
    check_device_pairs,
    check_tls,
    device_pairs,
)
from tests.ranktable_tools import recorded
from tests.ranktable_tools.bench import ELSEWHERE, HERE, Bench, server, tables

UP, HEALTHY = "link status: UP\n", "net health status: Success\n"
TWO_HOSTS = tables([server(HERE, "0,1")], [server(ELSEWHERE, "6,7")])


def _bench(folder: Path, hccn: dict[str, str], spod: str = recorded.NO_SUPER_POD) -> Bench:
    bench = Bench(folder, "davinci0", "davinci1")
    bench.tool("hccn_tool", hccn, other=recorded.NO_DEVICE)
    bench.tool("npu-smi", {"info": recorded.INFO_A2, "info -t spod-info -i 0 -c 0": spod})
    return bench


def _answers_of_both(flag: str, first: str, second: str | None = None) -> dict[str, str]:
    return {f"-i 0 {flag} -g": first, f"-i 1 {flag} -g": first if second is None else second}


def test_links_that_are_up_and_healthy_are_ok(tmp_path: Path) -> None:
    bench = _bench(tmp_path, {**_answers_of_both("-link", UP), **_answers_of_both("-net_health", HEALTHY)})

    verdict = check_device_links(bench.case())

    assert (verdict.result, verdict.message) == ("ok", "2 links up")


@pytest.mark.parametrize(("spod", "result"), [(recorded.NO_SUPER_POD, "fail"), (recorded.SUPER_POD, "warn")])
def test_a_link_that_is_down_is_a_failure_and_on_an_a3_a_warning(tmp_path: Path, spod: str, result: str) -> None:
    answers = {**_answers_of_both("-link", UP, "link status: DOWN\n"), **_answers_of_both("-net_health", HEALTHY)}

    verdict = check_device_links(_bench(tmp_path, answers, spod).case())

    assert (verdict.result, verdict.message) == (result, "the link of device 1 is DOWN")


def test_an_unhealthy_network_is_reported_in_the_tools_own_term(tmp_path: Path) -> None:
    answers = {
        **_answers_of_both("-link", UP),
        **_answers_of_both("-net_health", HEALTHY, "net health status: Unreachable\n"),
    }

    verdict = check_device_links(_bench(tmp_path, answers).case())

    assert (verdict.result, verdict.message) == ("warn", "the network health of device 1 is Unreachable")


def test_one_tls_switch_on_all_devices_is_ok(tmp_path: Path) -> None:
    verdict = check_tls(_bench(tmp_path, _answers_of_both("-tls", recorded.TLS)).case())

    assert (verdict.result, verdict.message) == ("ok", "the TLS switch is 0 on the devices 0,1 of this host")


def test_the_hosts_whose_tls_switches_are_not_compared_are_named(tmp_path: Path) -> None:
    verdict = check_tls(_bench(tmp_path, _answers_of_both("-tls", recorded.TLS)).case(TWO_HOSTS))

    assert verdict.message == (
        "the TLS switch is 0 on the devices 0,1 of this host; "
        f"not compared: {ELSEWHERE}, where `ranktable doctor` must show the same"
    )


def test_two_tls_switches_are_a_failure_that_names_the_one_to_set(tmp_path: Path) -> None:
    answers = _answers_of_both("-tls", recorded.TLS, recorded.TLS.replace("switch[0]", "switch[1]"))

    verdict = check_tls(_bench(tmp_path, answers).case())

    assert (verdict.result, verdict.message) == ("fail", "the TLS switches differ: device 0 has 0, device 1 has 1")
    assert verdict.next_step == "hccn_tool -i 1 -tls -s enable 0"


def test_a_device_without_a_tls_switch_is_a_warning(tmp_path: Path) -> None:
    verdict = check_tls(_bench(tmp_path, {"-i 0 -tls -g": recorded.TLS}).case())

    assert (verdict.result, verdict.message) == ("warn", "the TLS switch of device 1 is unknown")


def test_every_pair_of_a_rank_is_pinged_in_turn(tmp_path: Path) -> None:
    pings = {f"-i {one} -ping -g address 10.20.0.{6 + one}": recorded.PING for one in (0, 1)}
    bench = _bench(tmp_path, pings)

    verdict = check_device_pairs(bench.case(TWO_HOSTS))

    assert (verdict.result, verdict.message) == ("ok", "2 device pairs can communicate")
    assert [call for call in bench.calls if "ping" in call] == [f"hccn_tool {arguments}" for arguments in pings]


def test_an_unreachable_pair_is_a_failure_in_the_tools_own_words(tmp_path: Path) -> None:
    pings = {"-i 0 -ping -g address 10.20.0.6": recorded.PING, "-i 1 -ping -g address 10.20.0.7": recorded.PING_LOST}

    verdict = check_device_pairs(_bench(tmp_path, pings).case(TWO_HOSTS))

    assert verdict.result == "fail"
    assert verdict.message.startswith("device 1 does not reach 10.20.0.7 (decode-0): device 3 PING 10.20.11.16 3")


def test_in_a_super_pod_hccs_counts_and_roce_is_enough(tmp_path: Path) -> None:
    pings = {
        "-i 0 -hccs_ping -g address 10.20.0.6": recorded.HCCS_PING,
        "-i 1 -hccs_ping -g address 10.20.0.7": recorded.HCCS_PING_FAILED[0],
        "-i 1 -ping -g address 10.20.0.7": recorded.PING,
    }
    bench = _bench(tmp_path, pings, recorded.SUPER_POD)

    assert check_device_pairs(bench.case(TWO_HOSTS)).result == "ok"
    assert [call for call in bench.calls if "ping" in call] == [f"hccn_tool {arguments}" for arguments in pings]


def test_pairs_are_those_of_the_other_role_on_other_hosts(tmp_path: Path) -> None:
    own = server(HERE, "0,1")
    given = tables([own, server(ELSEWHERE, "2,3")], [server(HERE, "4,5"), server(ELSEWHERE, "6,7,8,9")], local=own)

    pairs = [(pair.own, pair.peer_ip) for pair in device_pairs(Bench(tmp_path).case(given))]

    assert pairs == [("0", "10.20.0.6"), ("1", "10.20.0.7"), ("0", "10.20.0.8"), ("1", "10.20.0.9")]


def test_the_limit_on_pinged_pairs_is_kept_and_reported(tmp_path: Path) -> None:
    many = [server(ELSEWHERE, f"{number}") for number in range(MAX_PINGS + 1)]
    pings = {f"-i 0 -ping -g address 10.20.0.{number}": recorded.PING for number in range(MAX_PINGS)}
    bench = _bench(tmp_path, pings)

    verdict = check_device_pairs(bench.case(tables([server(HERE, "0")], many)))

    assert (verdict.result, verdict.message) == ("ok", "64 device pairs (of 65) can communicate")


def test_after_the_ping_deadline_the_number_of_pings_is_reported(tmp_path: Path) -> None:
    bench = _bench(tmp_path, {"-i 0 -ping -g address 10.20.0.6": recorded.PING})

    verdict = check_device_pairs(replace(bench.case(TWO_HOSTS), pings_s=0.0))

    assert (verdict.result, verdict.message) == ("ok", "1 device pair (of 2) can communicate")


def test_without_npus_or_hccn_tool_nothing_is_queried(tmp_path: Path) -> None:
    cpu, bare = Bench(tmp_path / "a"), Bench(tmp_path / "b", "davinci0")

    for check in (check_device_links, check_tls, check_device_pairs):
        assert check(cpu.case(TWO_HOSTS)).message == "no NPU on this machine"
        assert check(bare.case(TWO_HOSTS)).result == "not here"
