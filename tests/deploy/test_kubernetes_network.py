"""Which connections the chart's NetworkPolicies allow, and what the pods get for mutual TLS."""

from collections.abc import Iterator

import jsonschema
import pytest

from pdserve import instance_flags
from scheduler import config
from tests.deploy.go_template import TemplateError
from tests.deploy.helm_template import documents
from tests.deploy.kube_chart import Object, main_of, objects, pod_of, rendered
from tests.deploy.kube_schemas import containers
from tests.deploy.kube_values import ALL, CLOSED, PLATFORM

GRPC, HTTP, METRICS, KV = 8088, 9000, 9100, 41234
WEB, OTHER = {"app": "web"}, {"app": "other"}
TLS = {"--tls-cert=/etc/pdserve/tls/tls.crt", "--tls-key=/etc/pdserve/tls/tls.key", "--tls-ca=/etc/pdserve/tls/ca.crt"}


def _labels(component: str) -> Object:
    labels: Object = pod_of(CLOSED, component)["metadata"]["labels"]
    return labels


def _policies(values: Object, labels: Object) -> Iterator[Object]:
    for each in objects(values, "NetworkPolicy"):
        if each["spec"]["podSelector"]["matchLabels"].items() <= labels.items():
            yield each["spec"]


def _allows(values: Object, source: Object, component: str, port: int) -> bool:
    """Whether a pod of these labels, in the same namespace, reaches a port: by the rules of the API, in short."""
    policies = list(_policies(values, _labels(component)))
    for rule in (rule for policy in policies for rule in policy.get("ingress", ())):
        peers = [one["podSelector"]["matchLabels"] for one in rule.get("from", ()) if "podSelector" in one]
        from_anyone = "from" not in rule
        if from_anyone or any(peer.items() <= source.items() for peer in peers):
            ports = [one["port"] for one in rule.get("ports", ())]
            if not ports or port in ports:
                return True
    return not policies


def test_policies_and_certificates_are_opt_in() -> None:
    others = [values for values in ALL.values() if values is not CLOSED]

    assert not [each for values in others for each in objects(values, "NetworkPolicy")]
    assert "tls" not in {volume["name"] for volume in pod_of({}, "decode")["spec"]["volumes"]}
    assert not TLS & set(main_of(pod_of({}, "decode"))["args"])


def test_clients_reach_the_scheduler_and_nothing_else() -> None:
    assert _allows(CLOSED, WEB, "scheduler", HTTP)
    assert not _allows(CLOSED, OTHER, "scheduler", HTTP)
    for component, port in (("prefill", GRPC), ("decode", KV), ("decode", METRICS), ("table-writer", HTTP)):
        assert not _allows(CLOSED, WEB, component, port), component


def test_without_named_clients_everyone_is_one() -> None:
    values = {"networkPolicy": {"enabled": True}}

    assert _allows(values, OTHER, "scheduler", HTTP)
    assert not _allows(values, OTHER, "decode", METRICS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_scheduler_and_instances_reach_each_others_ports(role: str) -> None:
    assert _allows(CLOSED, _labels("scheduler"), role, GRPC)
    assert not _allows(CLOSED, _labels("scheduler"), role, KV)
    for peer in ("prefill", "decode"):
        assert _allows(CLOSED, _labels(peer), role, KV)
    assert not _allows(CLOSED, _labels("table-writer"), role, GRPC)


def test_metrics_of_instances_and_scheduler_are_reachable() -> None:
    monitoring = CLOSED["networkPolicy"]["monitoring"][0]
    rules = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"].get("ingress", [])
        for each in objects(CLOSED, "NetworkPolicy")
    }

    for role, port in (("prefill", METRICS), ("decode", METRICS), ("scheduler", HTTP)):
        assert any(monitoring in rule["from"] and rule["ports"][0]["port"] == port for rule in rules[role])
    assert rules["table-writer"] == []


def test_a_platforms_table_has_no_writer_to_close() -> None:
    values = PLATFORM | {"networkPolicy": {"enabled": True}}

    assert len(objects(values, "NetworkPolicy")) == 3


@pytest.mark.parametrize("role", ["scheduler", "prefill", "decode"])
def test_mutual_tls_is_a_secret_mounted_in_the_roles_container_only(role: str) -> None:
    pod = pod_of(CLOSED, role)
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {one["name"]: {mount["name"]: mount for mount in one["volumeMounts"]} for one in containers(pod)}

    assert set(main_of(pod)["args"]) >= TLS
    assert volumes["tls"]["secret"] == {"secretName": "pdserve-tls", "defaultMode": 0o440}
    assert [name for name, each in mounts.items() if "tls" in each] == [role]
    assert mounts[role]["tls"] == {"name": "tls", "mountPath": "/etc/pdserve/tls", "readOnly": True}


def test_the_processes_take_these_flags() -> None:
    args = main_of(pod_of(CLOSED, "decode"))["args"]
    flags = [word for word in args if word.startswith("--tls-")]

    engine = config.parse(["--model=/m", *flags]).engine
    typed = instance_flags.parse_instance_flags(["--model=/m", *flags], {})
    assert (engine.tls_cert, engine.tls_key) == ("/etc/pdserve/tls/tls.crt", "/etc/pdserve/tls/tls.key")
    assert (typed.options.tls_ca, typed.notices) == ("/etc/pdserve/tls/ca.crt", ())


def test_another_volume_may_give_each_pod_its_certificate() -> None:
    volume = {"csi": {"driver": "csi.cert-manager.io", "readOnly": True, "volumeAttributes": {"x/issuer-name": "ca"}}}
    values = {"tls": {"enabled": True, "volume": volume}, "instance": {"probe": "http"}}

    (found,) = (one for one in pod_of(values, "decode")["spec"]["volumes"] if one["name"] == "tls")
    assert found == {"name": "tls", **volume}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tls": {"enabled": True, "existing": "x"}}, "instance.probe is grpc, but with tls.enabled it must be http"),
        ({"tls": {"enabled": True}, "instance": {"probe": "http"}}, "tls.existing is empty: name a Secret"),
        ({"tls": {"enabled": True, "existing": "x"}, "ray": {"enabled": True}}, "cannot be used with ray.enabled"),
        ({"networkPolicy": {"enabled": True}, "ray": {"enabled": True}}, "cannot be used with ray.enabled"),
        ({"networkPolicy": {"enabled": True}, "decode": {"hostNetwork": True}}, "cannot be used with hostNetwork"),
    ],
)
def test_what_would_not_work_is_refused_with_a_reason(values: Object, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        documents(values)


@pytest.mark.parametrize("values", [{"tls": {"secret": "x"}}, {"networkPolicy": {"clients": {"app": "web"}}}])
def test_a_typo_is_refused(values: Object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        documents(values)


def test_the_set_of_the_other_tests_has_both() -> None:
    assert {each["kind"] for each in rendered(CLOSED)} >= {"NetworkPolicy", "StatefulSet"}
