"""The pods of the Helm chart: their commands, rights, probes, shutdown and placement."""

from pathlib import Path

import pytest

from pdserve import instance_flags
from ranktable_tools.kube.command_line import parse_words
from scheduler import config
from tests.deploy.helm_template import CLONE
from tests.deploy.kube_chart import SETS, Object, flag, main_of, objects, pod_of, pods, rendered
from tests.deploy.kube_schemas import containers
from tests.deploy.kube_values import ALL, GPU, KUBEINFER, NPU, PLATFORM


@pytest.mark.parametrize("values", SETS)
def test_every_containers_command_is_one_that_ours_accept(values: Object) -> None:
    for pod in pods(values):
        for container in containers(pod):
            words = container.get("args", [])
            if words[:4] != ["python", "-P", "-m", "ranktable_tools.kube"]:
                assert words in ([], ["pdserve", "model", "path"])
                continue
            parsed = parse_words(words[4:])
            if parsed.words:
                _check_flags(container["name"], parsed.words)
            hook = container.get("lifecycle", {}).get("preStop")
            if hook:
                parse_words(hook["exec"]["command"][4:])


def _check_flags(role: str, words: list[str]) -> None:
    program, script, *flags = words
    path = CLONE / Path(script).relative_to("/opt/pdserve")
    assert (program, path.is_file()) == ("sh", True)
    if role == "scheduler":
        assert config.parse(flags).engine.port == 9000
    else:
        assert instance_flags.parse_instance_flags(flags, {}).notices == ()


@pytest.mark.parametrize("values", SETS)
def test_pods_have_no_right_that_they_do_not_need(values: Object) -> None:
    for pod in pods(values):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (1000, True)
        for container in containers(pod):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            has_token = "token" in {mount["name"] for mount in container["volumeMounts"]}
            assert has_token == (container["name"] in ("announce", "table-writer"))


def test_a_service_named_pdserve_sets_none_of_our_variables() -> None:
    assert all(pod["spec"]["enableServiceLinks"] is False for values in ALL.values() for pod in pods(values))


def test_kubernetes_roles_allow_only_what_is_used() -> None:
    rules = {each["metadata"]["name"]: each["rules"] for each in objects({}, "Role")}

    assert rules == {
        "pdserve-member": [
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["pdserve-parts"], "verbs": ["patch"]},
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["pdserve-ranktable"], "verbs": ["get"]},
        ],
        "pdserve-table-writer": [
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["pdserve-parts"], "verbs": ["get"]},
            {
                "apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["pdserve-ranktable"],
                "verbs": ["get", "update"],
            },
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        ],
    }  # fmt: skip
    assert not objects({}, "ClusterRole")
    for binding in objects({}, "RoleBinding"):
        assert binding["roleRef"]["name"] in rules
        assert binding["subjects"][0]["namespace"] == "models"


@pytest.mark.parametrize("seconds", [1, 60, 3600])
def test_a_pods_grace_is_longer_than_its_drain(seconds: int) -> None:
    values = {"instance": {"drainSeconds": seconds}, "scheduler": {"shutdownSeconds": seconds}}

    for role in ("prefill", "decode", "scheduler"):
        pod = pod_of(values, role)
        words = main_of(pod)["args"] if role == "scheduler" else main_of(pod)["lifecycle"]["preStop"]["exec"]["command"]
        drain = int(flag(words, "--shutdown-timeout" if role == "scheduler" else "--timeout"))
        assert (drain, pod["spec"]["terminationGracePeriodSeconds"]) == (seconds, seconds + 20)


def test_instances_are_probed_over_grpc_and_the_scheduler_over_http() -> None:
    for role in ("prefill", "decode"):
        main = main_of(pod_of({}, role))
        port = int(flag(main["args"], "--port"))
        assert [main[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")] == [{"port": port}] * 3
        by_http = main_of(pod_of(GPU, role))
        fields = {"path": "/health", "port": int(flag(by_http["args"], "--http-port"))}
        assert by_http["readinessProbe"]["httpGet"] == fields
    main = main_of(pod_of({}, "scheduler"))
    assert main["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert main["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_a_start_may_take_as_long_as_the_table_and_the_model() -> None:
    values = {"table": {"waitSeconds": 300}, "instance": {"startupSeconds": 900}}
    probe = main_of(pod_of(values, "decode"))["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] == 1200


def test_there_is_one_scheduler_and_instances_start_together() -> None:
    scheduler = next(each for each in objects({}, "Deployment") if each["metadata"]["name"].endswith("scheduler"))

    assert (scheduler["spec"]["replicas"], scheduler["spec"]["strategy"]) == (1, {"type": "Recreate"})
    assert {each["spec"]["podManagementPolicy"] for each in objects({}, "StatefulSet")} == {"Parallel"}
    assert {each["spec"]["leaderWorkerTemplate"]["size"] for each in objects(GPU, "LeaderWorkerSet")} == {1}


def test_the_writer_waits_for_all_instances() -> None:
    pod = pod_of(NPU, "table-writer")
    few = pod_of({"table": {"waitForPrefill": 1}, "prefill": {"replicas": 4}}, "table-writer")

    assert {"--prefill=2", "--decode=3"} <= set(main_of(pod)["args"])
    assert {"--prefill=1", "--decode=1"} <= set(main_of(few)["args"])


@pytest.mark.parametrize(("values", "role", "limits"), [
    (NPU, "prefill", {"huawei.com/Ascend910": "4"}),
    (NPU, "decode", {"huawei.com/Ascend910": "2", "memory": "64Gi"}),
    (GPU, "prefill", {"nvidia.com/gpu": "2"}),
    (GPU | {"device": {"type": "cuda", "resource": "nvidia.com/mig-1g.5gb"}}, "decode", {"nvidia.com/mig-1g.5gb": "1"}),
    ({"device": {"type": "npu", "resource": "huawei.com/ascend-1980"}}, "decode", {"huawei.com/ascend-1980": "1"}),
    ({}, "prefill", {}),
    (NPU, "scheduler", {}),
])  # fmt: skip
def test_cards_are_requested_under_the_plugins_names(values: Object, role: str, limits: Object) -> None:
    main = main_of(pod_of(values, role))

    assert main["resources"].get("limits", {}) == limits
    assert {key: value for key, value in main["resources"]["requests"].items() if "/" in key} == {
        key: value for key, value in limits.items() if "/" in key
    }
    if role != "scheduler":
        wanted = next((value for key, value in limits.items() if "/" in key), "1")
        assert f"--num-devices={wanted}" in main["args"]


def test_npus_get_their_driver_and_their_numbers() -> None:
    pod, scheduler = pod_of(NPU, "prefill"), pod_of(NPU, "scheduler")
    mounts = {mount["mountPath"] for mount in main_of(pod)["volumeMounts"]}
    variables = {each["name"]: each.get("valueFrom") for each in main_of(pod)["env"]}

    assert {"/usr/local/Ascend/driver", "/usr/local/sbin/npu-smi", "/etc/hccn.conf", "/dev/shm"} <= mounts
    assert variables["ASCEND_VISIBLE_DEVICES"] == {
        "fieldRef": {"fieldPath": "metadata.annotations['huawei.com/Ascend910']"}
    }
    assert not [volume for volume in scheduler["spec"]["volumes"] if "hostPath" in volume]
    assert "ASCEND_VISIBLE_DEVICES" not in {each["name"] for each in main_of(scheduler)["env"]}


def test_node_selection_is_per_role() -> None:
    spec = pod_of(NPU, "prefill")["spec"]

    assert spec["schedulerName"] == "volcano"
    assert spec["nodeSelector"] == {"accelerator-type": "module-910b-8"}
    assert spec["tolerations"][0]["key"] == "npu"
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert pod_of(NPU, "prefill")["metadata"]["labels"]["ring-controller.atlas"] == "ascend-910b"
    assert not {"schedulerName", "nodeSelector", "tolerations", "hostNetwork"} & set(pod_of(NPU, "decode")["spec"])


def test_a_platforms_table_is_used_unchanged() -> None:
    kinds = {each["kind"] for each in rendered(PLATFORM)}

    assert not kinds & {"ConfigMap", "Role", "RoleBinding", "ServiceAccount"}
    for role in ("prefill", "decode", "scheduler"):
        pod, converted = pod_of(PLATFORM, role), pod_of(KUBEINFER, role)
        mount = next(each for each in main_of(pod)["volumeMounts"] if each["name"] == "platform")
        assert mount["mountPath"] == "/user/global/config"
        assert "--table=/user/global/config/global_rank_table.json" in main_of(pod)["args"]
        assert [each["name"] for each in containers(pod)] == [role]
        assert [each["name"] for each in containers(converted)] == ["follow", "model", role]
        assert {"--dialect=kubeinfer", "--num-prefill=1"} <= set(containers(converted)[0]["args"])
