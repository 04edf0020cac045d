"""How the cluster's table is merged from the parts of pods and the existing pods."""

import json

from ranktable_tools.kube.api import Pod
from ranktable_tools.kube.merging import INITIALIZING, ClusterSize, Decision, decide, is_completed
from tests.deploy.kube_parts import part

SCHEDULER, P, D = part("scheduler", "10.0.0.9"), part("prefill", "10.0.0.1"), part("decode", "10.0.0.2")
PARTS = {"s": SCHEDULER, "p-0": P, "d-0": D}
ONE_EACH = ClusterSize(1, 1)


def _pods(**addresses: str) -> list[Pod]:
    return [Pod(name.replace("_", "-"), (address,), leaving=False) for name, address in addresses.items()]


PODS = _pods(s="10.0.0.8", p_0="10.0.0.1", d_0="10.0.0.2")


def _hosts(decision: Decision) -> list[list[str]]:
    groups = json.loads(decision.text)["server_group_list"]
    return [[server["server_ip"] for server in group["server_list"]] for group in groups]


def test_it_waits_until_every_instance_has_its_part() -> None:
    decision = decide({"p-0": P}, PODS, None, ClusterSize(2, 1))

    assert json.loads(decision.text) == {"version": "1.0", "status": "initializing"}
    assert decision.notes == ("waiting: no scheduler; 1 of 2 prefill instances; 0 of 1 decode instances",)


def test_the_complete_table_is_the_parts_with_their_ports() -> None:
    decision = decide(PARTS, PODS, INITIALIZING, ONE_EACH)

    assert _hosts(decision) == [["10.0.0.9"], ["10.0.0.1"], ["10.0.0.2"]]
    assert json.loads(decision.text)["server_group_list"][1]["server_list"][0]["server_port"] == "8088"
    assert decision.description == "completed: prefill-0 10.0.0.1, decode-0 10.0.0.2"


def test_instances_are_in_the_order_of_their_pods() -> None:
    parts = PARTS | {f"p-{number}": part("prefill", f"10.0.1.{number}") for number in (10, 2, 1)}
    pods = [*PODS, *_pods(p_10="10.0.1.10", p_2="10.0.1.2", p_1="10.0.1.1")]

    assert _hosts(decide(parts, pods, None, ONE_EACH))[1] == ["10.0.0.1", "10.0.1.1", "10.0.1.2", "10.0.1.10"]


def test_a_complete_table_follows_instances_that_come_and_go() -> None:
    first = decide(PARTS, PODS, None, ONE_EACH).text
    more = PARTS | {"d-1": part("decode", "10.0.0.3")}
    both = [*PODS, *_pods(d_1="10.0.0.3")]
    going = [pod if pod.name != "d-0" else Pod("d-0", pod.addresses, leaving=True) for pod in both]

    assert _hosts(decide(more, both, first, ONE_EACH))[2] == ["10.0.0.2", "10.0.0.3"]
    assert _hosts(decide(more, going, first, ONE_EACH))[2] == ["10.0.0.3"]


def test_a_live_table_stays_completed_with_fewer_instances() -> None:
    first = decide(PARTS, PODS, None, ONE_EACH).text

    assert is_completed(decide(PARTS, PODS, first, ClusterSize(5, 5)).text)


def test_a_table_without_a_role_is_never_written() -> None:
    first = decide(PARTS, PODS, None, ONE_EACH).text

    decision = decide(PARTS, PODS[:2], first, ONE_EACH)

    assert decision.text == first
    assert decision.notes == ("kept as it is: 0 of 1 decode instances",)


def test_a_part_older_than_its_pod_does_not_count() -> None:
    waits = _pods(s="10.0.0.8", p_0="10.0.0.7", d_0="10.0.0.2")

    decision = decide(PARTS, waits, None, ONE_EACH)

    assert not is_completed(decision.text)
    assert decision.notes[0] == "left out: p-0 wrote 10.0.0.1, but the pod has 10.0.0.7"


def test_a_pod_without_an_address_yet_is_not_an_error() -> None:
    pods = [*PODS[:2], Pod("d-0", (), leaving=False)]

    assert decide(PARTS, pods, None, ONE_EACH).notes == ("waiting: 0 of 1 decode instances",)


def test_the_schedulers_part_may_name_its_service() -> None:
    parts = PARTS | {"s": part("scheduler", "pdserve.models.svc")}

    assert _hosts(decide(parts, PODS, None, ONE_EACH))[0] == ["pdserve.models.svc"]


def test_two_pods_of_one_scheduler_are_one() -> None:
    pods = [*PODS, *_pods(s_2="10.0.0.88")]

    assert _hosts(decide(PARTS | {"s-2": SCHEDULER}, pods, None, ONE_EACH))[0] == ["10.0.0.9"]


def test_of_two_schedulers_the_second_is_left_out() -> None:
    parts = PARTS | {"s-2": part("scheduler", "10.0.0.88")}

    decision = decide(parts, [*PODS, *_pods(s_2="10.0.0.88")], None, ONE_EACH)

    assert _hosts(decision)[0] == ["10.0.0.9"]
    assert "s and s-2 have one each" in decision.notes[0]


def test_a_card_in_two_pods_of_a_host_is_reported_and_stops_no_other() -> None:
    parts = PARTS | {"d-1": part("decode", "10.0.0.1", port=8089)}
    pods = [*PODS, *_pods(d_1="10.0.0.1")]

    decision = decide(parts, pods, None, ONE_EACH)

    assert _hosts(decision)[2] == ["10.0.0.2"]
    assert decision.notes[0].startswith("left out: d-1: ")
    assert "p-0: prefill-0.device[0].device_id" in decision.notes[0]


def test_parts_that_cannot_be_merged_in_any_way_are_reported() -> None:
    parts = PARTS | {"d-0": part("decode", "10.0.0.1", port=8089)}
    pods = _pods(s="10.0.0.8", p_0="10.0.0.1", d_0="10.0.0.1")

    decision = decide(parts, pods, None, ONE_EACH)

    assert not is_completed(decision.text)
    assert decision.notes[0].startswith("not merged: p-0: prefill-0.device[0].device_id")


def test_a_serving_pod_keeps_its_card_when_a_new_pod_claims_it() -> None:
    first = decide(PARTS, PODS, None, ONE_EACH).text
    parts = PARTS | {"a-0": part("decode", "10.0.0.2", port=8089)}

    decision = decide(parts, [*PODS, *_pods(a_0="10.0.0.2")], first, ONE_EACH)

    assert decision.text == first
    assert decision.notes[0].startswith("left out: a-0: ")


def test_a_broken_part_is_left_out_with_its_pods_name() -> None:
    parts = PARTS | {"p-1": "{", "p-2": P.replace('"1"', "1", 1), "gone": "{"}
    pods = [*PODS, *_pods(p_1="10.0.0.4", p_2="10.0.0.5")]

    decision = decide(parts, pods, None, ONE_EACH)

    assert is_completed(decision.text)
    assert [note.split(":")[1].strip() for note in decision.notes] == ["p-1", "p-2"]


def test_a_table_that_somebody_broke_is_written_again() -> None:
    broken = '{"status": "completed", "server_group_list": 7}'

    assert _hosts(decide(PARTS, PODS, broken, ONE_EACH)) == [["10.0.0.9"], ["10.0.0.1"], ["10.0.0.2"]]


def test_a_text_that_is_not_a_table_is_not_completed() -> None:
    assert not any(is_completed(text) for text in ("", "[]", '{"status": "initializing"}', '"completed"'))
