"""Every broken table in a dialect other than the guide's, as data: HCCL's, MindIE's, kubeinfer's and vllm-ascend's."""

from collections.abc import Mapping

from tests.docs.broken_input import Broken
from tests.ranktable_tools.broken_inputs import changed, lint_row, with_value
from tests.ranktable_tools.documents import (
    A,
    B,
    C,
    group,
    grouped,
    hccl,
    hccl_1_2,
    kubeinfer,
    mindie,
    modelarts,
    pod,
    server,
    vllm_ascend,
)

_hccl, _pods, _mindie, _vllm = changed(hccl), changed(hccl_1_2), changed(mindie), changed(vllm_ascend)

OTHER_DIALECTS = (
    lint_row("HCCL: a server_id twice", "server-id-twice", hccl(server(A, 0), server(A, 1, first_rank=1))),
    _hccl("HCCL: a server_id of 65 characters", "long-server-id", "server_list.0.server_id", "a" * 65),
    lint_row(
        "HCCL: no device address between two hosts",
        "no-device-ip",
        with_value(hccl(), "server_list.1.device.0.device_ip", ...),
    ),
    _hccl("HCCL: a host name for a device", "device-name", "server_list.0.device.0.device_ip", "npu0.example"),
    _pods(
        "HCCL 1.2: a host name for a device's second address",
        "device-name",
        "server_list.0.device.0.backup_device_ip",
        "npu0.example",
    ),
    _pods("HCCL 1.2: no super_device_id", "no-super-device", "server_list.0.device.0.super_device_id", ...),
    _pods(
        "HCCL 1.2: a super_device_id twice", "super-device-twice", "server_list.1.device.0.super_device_id", "113246208"
    ),
    _pods("HCCL 1.2: an empty super_device_id", "bad-number", "server_list.0.device.0.super_device_id", ""),
    _pods(
        "HCCL 1.2: a super_device_id past 2^30", "number-range", "server_list.0.device.0.super_device_id", "1073741825"
    ),
    _pods("HCCL 1.2: a server in no super pod", "super-pod-missing", "super_pod_list", [pod("1", A)]),
    _pods("HCCL 1.2: a super pod names an unknown server", "super-pod-server", "super_pod_list", [pod("1", A, B, C)]),
    _pods("HCCL 1.2: a server in two super pods", "super-pod-twice", "super_pod_list", [pod("1", A, B), pod("2", B)]),
    lint_row(
        "HCCL 1.2: a super pod in two pieces",
        "super-pod-apart",
        {
            **hccl_1_2(),
            "server_count": "3",
            "server_list": [
                {**entry, "device": [{**entry["device"][0], "rank_id": str(rank), "super_device_id": str(rank)}]}
                for rank, entry in enumerate(hccl(server(A, 0), server(B, 0), server(C, 0))["server_list"])
            ],
            "super_pod_list": [pod("1", A, C), pod("2", B)],
        },
    ),
    lint_row(
        "MindIE: a controller with a device, as the guide's prefill group",
        "scheduler-device",
        modelarts(),
        "--dialect",
        "mindie",
    ),
    _mindie("MindIE: three coordinators", "scheduler-count", "server_group_list.0", group(0, *map(server, (A, B, C)))),
    _mindie("MindIE: no port", "bad-port", "server_group_list.2.server_list.0.predict_port", "99999"),
    _mindie("MindIE: no port, as a number", "bad-port", "server_group_list.0.server_list.1.mgmt_port", 0),
    _mindie(
        "MindIE: a device_id past 2048", "number-range", "server_group_list.3.server_list.0.device.0.device_id", "2049"
    ),
    lint_row(
        "MindIE: more than 98 groups",
        "too-many",
        grouped(*mindie()["server_group_list"][:2], *(group(n, server(A, n), deploy_server="0") for n in range(2, 99))),
    ),
    lint_row("kubeinfer: --num-prefill leaves no decode instance", "num-prefill", kubeinfer(), "--num-prefill", "3"),
    lint_row(
        "vllm-ascend: --devices-per-instance divides no list",
        "devices-per-instance",
        vllm_ascend(),
        "--devices-per-instance",
        "3",
    ),
    _vllm(
        "vllm-ascend: one cluster_id for prefill and decode",
        "cluster-id-twice",
        "decode_device_list.0.cluster_id",
        "1",
    ),
    _vllm("vllm-ascend: a false server_count", "server-count", "server_count", "2"),
    _vllm("vllm-ascend: an empty list", "empty-list", "decode_device_list", []),
)

SECTIONS: Mapping[str, tuple[Broken, ...]] = {"Tables: other dialects": OTHER_DIALECTS}
