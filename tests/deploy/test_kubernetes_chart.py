"""The Helm chart: what it renders is what the API takes, holds together, and starts what we have."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pdserve import instance_flags
from ranktable_tools.kube.command_line import parse_words
from scheduler import config
from tests.deploy.go_template import TemplateError
from tests.deploy.helm_template import CHART, CLONE, MANIFESTS, documents, files, manifests
from tests.deploy.kube_schemas import VERSIONS, check, containers, pod_templates
from tests.deploy.kube_values import ALL, GPU, KUBEINFER, MONITORED, NPU, PLATFORM, RAY, RAY_NPU

Object = dict[str, Any]
SETS = [pytest.param(values, id=name) for name, values in ALL.items()]


@functools.cache
def _rendered(values: str) -> list[Object]:
    return documents(json.loads(values))


def _objects(values: Object, kind: str) -> list[Object]:
    return [each for each in _rendered(json.dumps(values)) if each["kind"] == kind]


def _names(values: Object, kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in _objects(values, kind)}


def _pods(values: Object) -> Iterator[Object]:
    for each in _rendered(json.dumps(values)):
        yield from pod_templates(each)


def _pod(values: Object, component: str) -> Object:
    return next(pod for pod in _pods(values) if pod["metadata"]["labels"]["app.kubernetes.io/component"] == component)


def _main(pod: Object) -> Object:
    found: Object = pod["spec"]["containers"][0]
    return found


def _flag(words: list[str], name: str) -> str:
    return next(word.split("=", 1)[1] for word in words if word.startswith(f"{name}="))


@pytest.mark.parametrize("values", SETS)
def test_the_api_takes_every_object(values: Object) -> None:
    for document in _rendered(json.dumps(values)):
        check(document, VERSIONS[-1])


@pytest.mark.long
@pytest.mark.parametrize("values", SETS)
def test_the_oldest_api_that_the_chart_is_for_takes_them_too(values: Object) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    for document in _rendered(json.dumps(values)):
        check(document, VERSIONS[0])


def test_an_unknown_field_would_be_found() -> None:
    for kind, place in (("StatefulSet", ("spec", "template", "spec")), ("PodDisruptionBudget", ("spec",))):
        document = json.loads(json.dumps(_objects({}, kind)[0]))
        functools.reduce(lambda value, key: value[key], place, document)["nodeSelektor"] = {}
        with pytest.raises(jsonschema.ValidationError, match="nodeSelektor"):
            check(document)


def test_there_is_what_the_issue_asks_for() -> None:
    kinds = {kind for each in (*_rendered("{}"), *_rendered(json.dumps(MONITORED))) for kind in [each["kind"]]}

    assert kinds == {
        "ConfigMap", "Deployment", "PodDisruptionBudget", "Role", "RoleBinding", "Secret", "Service", "ServiceAccount",
        "ServiceMonitor", "StatefulSet",
    }  # fmt: skip
    assert _names({}, "Deployment") == {"pdserve-scheduler", "pdserve-table-writer"}
    assert _names({}, "StatefulSet") == {"pdserve-prefill", "pdserve-decode"}
    assert _names(GPU, "LeaderWorkerSet") == {"pdserve-prefill", "pdserve-decode"}
    assert [each["kind"] for each in _rendered(json.dumps(RAY))] == ["RayJob", "Service"]


@pytest.mark.parametrize("values", SETS)
def test_what_a_pod_names_is_there(values: Object) -> None:
    maps, accounts = _names(values, "ConfigMap"), _names(values, "ServiceAccount")
    for pod in _pods(values):
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        assert pod["spec"].get("serviceAccountName", "default") in {*accounts, "default"}
        for container in containers(pod):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            for word in container.get("args", ()):
                if word.startswith(("--parts=", "--ranktable=")):
                    assert word.split("=")[1] in maps
        if "secret" in volumes:
            name = volumes["secret"]["secret"]["secretName"]
            assert name in _names(values, "Secret") or name == values["clusterSecret"]["existing"]


@pytest.mark.parametrize("values", SETS)
def test_services_selectors_and_budgets_find_their_pods(values: Object) -> None:
    labels = [pod["metadata"]["labels"] for pod in _pods(values)]
    selectors = [each["spec"]["selector"] for each in _objects(values, "Service")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in _objects(values, "PodDisruptionBudget")]
    for kind in ("Deployment", "StatefulSet"):
        for each in _objects(values, kind):
            wanted = each["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    for selector in selectors:
        assert any(selector.items() <= each.items() for each in labels), selector


def test_a_services_ports_are_containers_ports() -> None:
    ports = {port["name"]: port["containerPort"] for pod in _pods({}) for port in _main(pod).get("ports", ())}

    for service in _objects({}, "Service"):
        for port in service["spec"]["ports"]:
            assert ports[port["name"]] == port["port"]
            assert port["targetPort"] in (port["name"], port["port"])
    monitored = {port["port"] for port in _objects(MONITORED, "ServiceMonitor")[0]["spec"]["endpoints"]}
    assert monitored <= set(ports)


@pytest.mark.parametrize("values", SETS)
def test_every_containers_line_is_one_that_our_commands_take(values: Object) -> None:
    for pod in _pods(values):
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
        assert instance_flags.typed_over_file(flags, {}).notices == ()


@pytest.mark.parametrize("values", SETS)
def test_pods_have_no_right_that_they_do_not_need(values: Object) -> None:
    for pod in _pods(values):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (1000, True)
        for container in containers(pod):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            has_token = "token" in {mount["name"] for mount in container["volumeMounts"]}
            assert has_token == (container["name"] in ("announce", "table-writer"))


def test_a_service_called_pdserve_sets_no_variable_of_ours() -> None:
    assert all(pod["spec"]["enableServiceLinks"] is False for values in ALL.values() for pod in _pods(values))


def test_roles_allow_what_is_done_and_nothing_else() -> None:
    rules = {each["metadata"]["name"]: each["rules"] for each in _objects({}, "Role")}

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
    assert not _objects({}, "ClusterRole")
    for binding in _objects({}, "RoleBinding"):
        assert binding["roleRef"]["name"] in rules
        assert binding["subjects"][0]["namespace"] == "models"


@pytest.mark.parametrize("seconds", [1, 60, 3600])
def test_a_pods_grace_is_longer_than_its_drain(seconds: int) -> None:
    values = {"instance": {"drainSeconds": seconds}, "scheduler": {"shutdownSeconds": seconds}}

    for role in ("prefill", "decode", "scheduler"):
        pod = _pod(values, role)
        words = _main(pod)["args"] if role == "scheduler" else _main(pod)["lifecycle"]["preStop"]["exec"]["command"]
        drain = int(_flag(words, "--shutdown-timeout" if role == "scheduler" else "--timeout"))
        assert (drain, pod["spec"]["terminationGracePeriodSeconds"]) == (seconds, seconds + 20)


def test_instances_are_asked_over_grpc_on_their_port_and_the_scheduler_over_http() -> None:
    for role in ("prefill", "decode"):
        main = _main(_pod({}, role))
        port = int(_flag(main["args"], "--port"))
        assert [main[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")] == [{"port": port}] * 3
        by_http = _main(_pod(GPU, role))
        asked = {"path": "/health", "port": int(_flag(by_http["args"], "--http-port"))}
        assert by_http["readinessProbe"]["httpGet"] == asked
    main = _main(_pod({}, "scheduler"))
    assert main["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert main["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_a_start_may_take_as_long_as_the_table_and_the_model() -> None:
    values = {"table": {"waitSeconds": 300}, "instance": {"startupSeconds": 900}}
    probe = _main(_pod(values, "decode"))["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] == 1200


def test_there_is_one_scheduler_and_instances_start_together() -> None:
    scheduler = next(each for each in _objects({}, "Deployment") if each["metadata"]["name"].endswith("scheduler"))

    assert (scheduler["spec"]["replicas"], scheduler["spec"]["strategy"]) == (1, {"type": "Recreate"})
    assert {each["spec"]["podManagementPolicy"] for each in _objects({}, "StatefulSet")} == {"Parallel"}
    assert {each["spec"]["leaderWorkerTemplate"]["size"] for each in _objects(GPU, "LeaderWorkerSet")} == {1}


def test_the_writer_waits_for_as_many_as_there_are() -> None:
    pod = _pod(NPU, "table-writer")
    few = _pod({"table": {"waitForPrefill": 1}, "prefill": {"replicas": 4}}, "table-writer")

    assert {"--prefill=2", "--decode=3"} <= set(_main(pod)["args"])
    assert {"--prefill=1", "--decode=1"} <= set(_main(few)["args"])


@pytest.mark.parametrize(("values", "role", "limits"), [
    (NPU, "prefill", {"huawei.com/Ascend910": "4"}),
    (NPU, "decode", {"huawei.com/Ascend910": "2", "memory": "64Gi"}),
    (GPU, "prefill", {"nvidia.com/gpu": "2"}),
    (GPU | {"device": {"type": "cuda", "resource": "nvidia.com/mig-1g.5gb"}}, "decode", {"nvidia.com/mig-1g.5gb": "1"}),
    ({"device": {"type": "npu", "resource": "huawei.com/ascend-1980"}}, "decode", {"huawei.com/ascend-1980": "1"}),
    ({}, "prefill", {}),
    (NPU, "scheduler", {}),
])  # fmt: skip
def test_cards_are_asked_for_as_the_plugin_calls_them(values: Object, role: str, limits: Object) -> None:
    main = _main(_pod(values, role))

    assert main["resources"].get("limits", {}) == limits
    assert {key: value for key, value in main["resources"]["requests"].items() if "/" in key} == {
        key: value for key, value in limits.items() if "/" in key
    }
    if role != "scheduler":
        wanted = next((value for key, value in limits.items() if "/" in key), "1")
        assert f"--num-devices={wanted}" in main["args"]


def test_npus_bring_their_driver_and_their_numbers() -> None:
    pod, scheduler = _pod(NPU, "prefill"), _pod(NPU, "scheduler")
    mounts = {mount["mountPath"] for mount in _main(pod)["volumeMounts"]}
    variables = {each["name"]: each.get("valueFrom") for each in _main(pod)["env"]}

    assert {"/usr/local/Ascend/driver", "/usr/local/sbin/npu-smi", "/etc/hccn.conf", "/dev/shm"} <= mounts
    assert variables["ASCEND_VISIBLE_DEVICES"] == {
        "fieldRef": {"fieldPath": "metadata.annotations['huawei.com/Ascend910']"}
    }
    assert not [volume for volume in scheduler["spec"]["volumes"] if "hostPath" in volume]
    assert "ASCEND_VISIBLE_DEVICES" not in {each["name"] for each in _main(scheduler)["env"]}


def test_where_pods_go_is_said_by_role() -> None:
    spec = _pod(NPU, "prefill")["spec"]

    assert spec["schedulerName"] == "volcano"
    assert spec["nodeSelector"] == {"accelerator-type": "module-910b-8"}
    assert spec["tolerations"][0]["key"] == "npu"
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert _pod(NPU, "prefill")["metadata"]["labels"]["ring-controller.atlas"] == "ascend-910b"
    assert not {"schedulerName", "nodeSelector", "tolerations", "hostNetwork"} & set(_pod(NPU, "decode")["spec"])


def test_a_platforms_table_is_used_as_it_is() -> None:
    kinds = {each["kind"] for each in _rendered(json.dumps(PLATFORM))}

    assert not kinds & {"ConfigMap", "Role", "RoleBinding", "ServiceAccount"}
    for role in ("prefill", "decode", "scheduler"):
        pod, converted = _pod(PLATFORM, role), _pod(KUBEINFER, role)
        mount = next(each for each in _main(pod)["volumeMounts"] if each["name"] == "platform")
        assert mount["mountPath"] == "/user/global/config"
        assert "--table=/user/global/config/global_rank_table.json" in _main(pod)["args"]
        assert [each["name"] for each in containers(pod)] == [role]
        assert [each["name"] for each in containers(converted)] == ["follow", "model", role]
        assert {"--dialect=kubeinfer", "--num-prefill=1"} <= set(containers(converted)[0]["args"])


def test_a_platforms_table_without_a_volume_is_refused_in_words() -> None:
    with pytest.raises(TemplateError, match="name the volume that has the platform's table"):
        documents({"table": {"platform": {"enabled": True}}})


@pytest.mark.parametrize(("values", "message"), [
    ({"prefil": {"replicas": 2}}, "'prefil' was unexpected"),
    ({"prefill": {"replica": 2}}, "'replica' was unexpected"),
    ({"device": {"type": "gpu"}}, "'gpu' is not one of"),
    ({"instance": {"port": 70000}}, "70000 is greater than the maximum"),
    ({"prefill": {"replicas": 0}}, "0 is less than the minimum"),
    ({"args": "--max-model-len=1"}, "is not of type 'array'"),
])  # fmt: skip
def test_a_slip_in_the_values_is_refused(values: Object, message: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=message):
        documents(values)


def test_every_value_has_its_place_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert set(values) == set(schema["properties"]) - {"global"}
    assert schema["additionalProperties"] is False


def test_every_value_is_read_by_a_template() -> None:
    text = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    for name, value in values.items():
        for key in value if isinstance(value, dict) else ():
            assert re.search(rf"\.{key}\b", text), f"{name}.{key}"
        assert re.search(rf"\.{name}\b", text), name


def test_a_secret_is_made_once_and_one_of_ones_own_is_taken() -> None:
    made = _objects({}, "Secret")[0]

    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert set(made["data"]) == {"cluster_secret"}
    assert not _objects(KUBEINFER, "Secret")
    volumes = {volume["name"]: volume for volume in _pod(KUBEINFER, "decode")["spec"]["volumes"]}
    assert volumes["secret"]["secret"]["secretName"] == "mine"


def test_releases_do_not_meet() -> None:
    first, second = (
        {(each["kind"], each["metadata"]["name"]) for each in documents({}, release=release)} for release in ("a", "b")
    )

    assert not first & second


def test_names_of_long_releases_stay_within_their_limit() -> None:
    for each in documents({}, release="r" * 53):
        assert len(each["metadata"]["name"]) <= 58, each["kind"]


def test_kuberay_runs_up_on_its_head() -> None:
    job = _objects(RAY, "RayJob")[0]["spec"]
    words = job["entrypoint"].split()

    assert words[:5] == ["pdserve", "up", "--ray", "--address", "auto"]
    assert "--max-model-len=2048" in words
    service = _objects(RAY, "Service")[0]["spec"]["selector"]
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service.items() <= head.items()
    npu = _objects(RAY_NPU, "RayJob")[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert npu["rayStartParams"]["resources"] == '"{\\"NPU\\": 8}"'
    assert npu["template"]["spec"]["containers"][0]["resources"]["limits"]["huawei.com/Ascend910"] == "8"


def test_the_plain_manifests_are_the_charts() -> None:
    for name, text in manifests().items():
        assert (MANIFESTS / name).read_text() == text, f"run scripts/kubernetes-manifests: {name}"


def test_kustomize_finds_the_plain_manifests() -> None:
    kustomization = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())

    assert kustomization["resources"] == ["cluster.yaml"]
    names = {each["metadata"]["name"] for each in yaml.safe_load_all((MANIFESTS / "cluster.yaml").read_text())}
    assert "pdserve-cluster-secret" not in names
    assert kustomization["images"][0]["name"] == "pdserve"


def test_no_file_of_the_chart_says_where_it_was_made() -> None:
    for text in files(NPU).values():
        assert "/tmp/" not in text
