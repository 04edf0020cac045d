"""The Helm chart: the API accepts what it renders, which is consistent, and typos are refused."""

import functools
import json
import re

import jsonschema
import pytest
import yaml

from pdserve import up_request
from tests.deploy.go_template import TemplateError
from tests.deploy.helm_template import CHART, CLONE, MANIFESTS, documents, files, manifests
from tests.deploy.kube_chart import SETS, Object, main_of, names, objects, pod_of, pods, rendered
from tests.deploy.kube_schemas import VERSIONS, check, containers
from tests.deploy.kube_values import GPU, KUBEINFER, MONITORED, NPU, RAY, RAY_NPU


@pytest.mark.parametrize("values", SETS)
def test_the_api_accepts_every_object(values: Object) -> None:
    for document in rendered(values):
        check(document, VERSIONS[-1])


@pytest.mark.long
@pytest.mark.parametrize("values", SETS)
def test_the_oldest_supported_api_accepts_them_too(values: Object) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    for document in rendered(values):
        check(document, VERSIONS[0])


def test_an_unknown_field_would_be_found() -> None:
    for kind, place in (("StatefulSet", ("spec", "template", "spec")), ("PodDisruptionBudget", ("spec",))):
        document = json.loads(json.dumps(objects({}, kind)[0]))
        functools.reduce(lambda value, key: value[key], place, document)["nodeSelektor"] = {}
        with pytest.raises(jsonschema.ValidationError, match="nodeSelektor"):
            check(document)


def test_the_chart_has_every_required_object() -> None:
    kinds = {kind for each in (*rendered({}), *rendered(MONITORED)) for kind in [each["kind"]]}

    assert kinds == {
        "ConfigMap", "Deployment", "PodDisruptionBudget", "Role", "RoleBinding", "Secret", "Service", "ServiceAccount",
        "ServiceMonitor", "StatefulSet",
    }  # fmt: skip
    assert names({}, "Deployment") == {"pdserve-scheduler", "pdserve-table-writer"}
    assert names({}, "StatefulSet") == {"pdserve-prefill", "pdserve-decode"}
    assert names(GPU, "LeaderWorkerSet") == {"pdserve-prefill", "pdserve-decode"}
    assert [each["kind"] for each in rendered(RAY)] == ["RayJob", "Service"]


@pytest.mark.parametrize("values", SETS)
def test_everything_a_pod_names_exists(values: Object) -> None:
    maps, accounts = names(values, "ConfigMap"), names(values, "ServiceAccount")
    for pod in pods(values):
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        assert pod["spec"].get("serviceAccountName", "default") in {*accounts, "default"}
        for container in containers(pod):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            for word in container.get("args", ()):
                if word.startswith(("--parts=", "--ranktable=")):
                    assert word.split("=")[1] in maps
        if "secret" in volumes:
            name = volumes["secret"]["secret"]["secretName"]
            assert name in names(values, "Secret") or name == values["clusterSecret"]["existing"]


@pytest.mark.parametrize("values", SETS)
def test_services_selectors_and_budgets_find_their_pods(values: Object) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(values)]
    selectors = [each["spec"]["selector"] for each in objects(values, "Service")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in objects(values, "PodDisruptionBudget")]
    for kind in ("Deployment", "StatefulSet"):
        for each in objects(values, kind):
            wanted = each["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    for selector in selectors:
        assert any(selector.items() <= each.items() for each in labels), selector


def test_a_services_ports_are_containers_ports() -> None:
    ports = {port["name"]: port["containerPort"] for pod in pods({}) for port in main_of(pod).get("ports", ())}

    for service in objects({}, "Service"):
        for port in service["spec"]["ports"]:
            assert ports[port["name"]] == port["port"]
            assert port["targetPort"] in (port["name"], port["port"])
    monitored = {port["port"] for port in objects(MONITORED, "ServiceMonitor")[0]["spec"]["endpoints"]}
    assert monitored <= set(ports)


def test_a_platforms_table_without_a_volume_is_refused_with_a_reason() -> None:
    with pytest.raises(TemplateError, match="set it to the volume that contains the platform's table"):
        documents({"table": {"platform": {"enabled": True}}})


@pytest.mark.parametrize(("values", "message"), [
    ({"prefil": {"replicas": 2}}, "'prefil' was unexpected"),
    ({"prefill": {"replica": 2}}, "'replica' was unexpected"),
    ({"device": {"type": "gpu"}}, "'gpu' is not one of"),
    ({"instance": {"port": 70000}}, "70000 is greater than the maximum"),
    ({"prefill": {"replicas": 0}}, "0 is less than the minimum"),
    ({"args": "--max-model-len=1"}, "is not of type 'array'"),
])  # fmt: skip
def test_a_typo_in_the_values_is_refused(values: Object, message: str) -> None:
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


def test_a_secret_is_created_once_and_a_users_own_is_used() -> None:
    made = objects({}, "Secret")[0]

    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert set(made["data"]) == {"cluster_secret"}
    assert not objects(KUBEINFER, "Secret")
    volumes = {volume["name"]: volume for volume in pod_of(KUBEINFER, "decode")["spec"]["volumes"]}
    assert volumes["secret"]["secret"]["secretName"] == "mine"


def test_releases_do_not_collide() -> None:
    first, second = (
        {(each["kind"], each["metadata"]["name"]) for each in documents({}, release=release)} for release in ("a", "b")
    )

    assert not first & second


def test_names_of_long_releases_stay_within_their_limit() -> None:
    for each in documents({}, release="r" * 53):
        assert len(each["metadata"]["name"]) <= 58, each["kind"]


def test_kuberay_runs_up_on_its_head() -> None:
    job = objects(RAY, "RayJob")[0]["spec"]
    words = job["entrypoint"].split()
    request = up_request.parse(words[2:])

    assert words[:2] == ["pdserve", "up"]
    assert (request.options.ray, request.options.address) == (True, "auto")
    assert (request.options.prefill, request.options.decode, request.engine.port) == (1, 1, 9000)
    assert "--max-model-len=2048" in words
    service = objects(RAY, "Service")[0]["spec"]["selector"]
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service.items() <= head.items()
    pinned = (CLONE / "constraints.txt").read_text().splitlines()
    assert f"ray=={job['rayClusterSpec']['rayVersion']}" in pinned


def test_kuberays_workers_declare_their_devices() -> None:
    workers = objects(RAY_NPU, "RayJob")[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]

    assert workers["rayStartParams"]["resources"] == '"{\\"NPU\\": 8}"'
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["huawei.com/Ascend910"] == "8"


def test_the_plain_manifests_are_the_charts() -> None:
    for name, text in manifests().items():
        assert (MANIFESTS / name).read_text() == text, f"run scripts/kubernetes-manifests: {name}"


def test_kustomize_finds_the_plain_manifests() -> None:
    kustomization = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())

    assert kustomization["resources"] == ["cluster.yaml"]
    names = {each["metadata"]["name"] for each in yaml.safe_load_all((MANIFESTS / "cluster.yaml").read_text())}
    assert "pdserve-cluster-secret" not in names
    assert kustomization["images"][0]["name"] == "pdserve"


def test_no_file_of_the_chart_has_local_paths() -> None:
    for text in files(NPU).values():
        assert "/tmp/" not in text
