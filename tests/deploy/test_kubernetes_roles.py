"""The chart's Roles, enforced by an API server: each account may make its own calls, and no others."""

from collections.abc import Callable
from pathlib import Path

from ranktable_tools.kube.api import KubeApi, KubeError
from tests.deploy.fake_kube import Cluster, access, serving
from tests.deploy.kube_chart import objects


def test_the_charts_roles_allow_each_account_only_its_own_calls(tmp_path: Path) -> None:
    parts, table = "pdserve-parts", "pdserve-ranktable"
    cluster = Cluster(objects({}, "Role"), objects({}, "RoleBinding"))
    cluster.accounts = {"m": "pdserve-member", "w": "pdserve-table-writer", "d": "default"}
    for name in (parts, table, "another"):
        cluster.create_config_map(name)
    with serving(cluster) as url:
        member, writer, other = (KubeApi(access(url, tmp_path, token)) for token in "mwd")
        held = writer.config_map(table)
        calls: dict[str, Callable[[KubeApi], object]] = {
            "read parts": lambda api: api.config_map(parts),
            "write a part": lambda api: api.set_keys(parts, {"p": "x"}),
            "read the table": lambda api: api.config_map(table),
            "patch the table": lambda api: api.set_keys(table, {"p": "x"}),
            "replace the table": lambda api: api.replace(held, {}),
            "list pods": lambda api: api.pods("app=pdserve"),
            "read another": lambda api: api.config_map("another"),
        }
        allowed = {
            who: {name for name, call in calls.items() if not _is_forbidden(call, api)}
            for who, api in (("member", member), ("writer", writer), ("other", other))
        }

    assert allowed == {
        "member": {"write a part", "read the table"},
        "writer": {"read parts", "read the table", "replace the table", "list pods"},
        "other": set(),
    }


def _is_forbidden(call: Callable[[KubeApi], object], api: KubeApi) -> bool:
    try:
        call(api)
    except KubeError as error:
        if error.status != 403:
            raise
        return True
    return False
