"""The chart's pods as processes of this machine: their exact commands, on loopback addresses, over a fake API server.

Not as in a cluster: paths are below a folder, the scheduler's Service is 127.0.0.1, and what the kubelet does to a pod
that is deleted is done here.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdserve.ports import free_ports
from tests.cluster.guide import START_TIMEOUT_S, STOP_TIMEOUT_S, GuideCluster, Process, Tables
from tests.deploy.fake_kube import NAMESPACE, Cluster, serving
from tests.deploy.helm_template import CLONE, documents, merged_values
from tests.deploy.kube_schemas import containers, pod_templates
from tests.security.certificates import Authority

Object = dict[str, Any]
SECRET = "k" * 64


class ContainerProcess(Process):
    """A container's entrypoint with its words."""

    def __init__(self, log: Path, words: Sequence[str], env: dict[str, str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [str(CLONE / "deploy" / "docker" / "entrypoint.sh"), *words], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env=env, start_new_session=True, cwd=log.parent,
            )  # fmt: skip


class KubeProcesses(GuideCluster):
    """A release of the chart. `kube` is what its API server keeps; the processes are called POD/CONTAINER."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        kube: Cluster,
        url: str,
        authority: Authority,
        flags: Sequence[str],
        values: Object,
    ) -> None:
        super().__init__(folder, model, tables=Tables(folder, ()))
        self.kube, self._url, self._authority = kube, url, authority
        grpc, http, self.port = free_ports(3)
        self.grpc_port = grpc
        own = {
            "model": {"path": str(model), "name": "tiny"}, "args": list(flags),
            "instance": {"port": grpc, "httpPort": http, "settleSeconds": 1}, "scheduler": {"port": self.port},
            "table": {"everySeconds": 0.2},
        }  # fmt: skip
        self.objects = documents(merged_values(own, values), namespace=NAMESPACE)
        self.client = type(self.client)(f"http://127.0.0.1:{self.port}", timeout_s=60.0)
        (folder / "secret").write_text(SECRET)
        self._apply()

    def _apply(self) -> None:
        """Create what the chart has, as `helm install` does, and the folders of its accounts' tokens."""
        of_kind = {kind: [each for each in self.objects if each["kind"] == kind] for kind in ("Role", "RoleBinding")}
        self.kube.roles, self.kube.bindings = of_kind["Role"], of_kind["RoleBinding"]
        for each in self.objects:
            name = each["metadata"]["name"]
            if each["kind"] == "ConfigMap":
                self.kube.create_config_map(name)
            elif each["kind"] == "ServiceAccount":
                self.kube.accounts[f"token-of-{name}"] = name
                folder = self.folder / name
                folder.mkdir()
                for file, text in (("token", f"token-of-{name}"), ("namespace", NAMESPACE)):
                    (folder / file).write_text(text)
                (folder / "ca.crt").write_bytes(self._authority.cert.read_bytes())

    def template(self, component: str) -> Object:
        """Return the template of the pods of a component."""
        found = (pod for each in self.objects for pod in pod_templates(each))
        return next(pod for pod in found if pod["metadata"]["labels"]["app.kubernetes.io/component"] == component)

    def run_pod(self, name: str, component: str, ip: str) -> None:
        """Start a pod's containers."""
        template = self.template(component)
        self.kube.run_pod(name, ip, template["metadata"]["labels"])
        (self.folder / name).mkdir()
        for container in containers(template):
            self._start(name, ip, container, template["spec"].get("serviceAccountName", ""))

    def delete_pod(self, name: str) -> str:
        """Do what the kubelet does: the hook, the containers, then the sidecars; return the output of the hook."""
        template = self.template(name.rsplit("-", 1)[0])
        pod = self.kube.pods[name]
        ip = pod["status"]["podIP"]
        self.kube.run_pod(name, ip, pod["metadata"]["labels"], deletionTimestamp="2026-01-01T00:00:00Z")
        hook_output = self._before_stop(template["spec"]["containers"][0], name, ip)
        for container in reversed(containers(template)):
            process = self.processes.pop(f"{name}/{container['name']}")
            self.retired.append(process)
            process.send(signal.SIGTERM)
            # An instance that ends by itself, its entry gone, may be at its last lines when the signal comes.
            assert process.wait(STOP_TIMEOUT_S) in (0, -signal.SIGTERM), process.log
        del self.kube.pods[name]
        return hook_output

    def crash(self, name: str) -> None:
        """Kill a pod's own container, and start it again as a kubelet does: in the same pod, beside its sidecar."""
        template = self.template(name.rsplit("-", 1)[0])
        main = template["spec"]["containers"][0]
        self.kill(f"{name}/{main['name']}")
        self._start(name, self.kube.pods[name]["status"]["podIP"], main, "")

    def _before_stop(self, main: Object, pod: str, ip: str) -> str:
        if "lifecycle" not in main:
            return ""
        words = self._words(main["lifecycle"]["preStop"]["exec"]["command"], pod, ip, "")
        env = self._environment(ip)
        return subprocess.run(words, capture_output=True, text=True, timeout=300, check=True, env=env).stdout

    def _start(self, pod: str, ip: str, container: Object, account: str) -> None:
        words = self._words(container["args"], pod, ip, account)
        log = self.folder / f"{pod}-{container['name']}-{len(self.retired)}.log"
        self.processes[f"{pod}/{container['name']}"] = ContainerProcess(log, words, self._environment(ip))

    def _words(self, words: Sequence[str], pod: str, ip: str, account: str) -> list[str]:
        own = self.folder / pod / "state"
        if any("/etc/pdserve/tls" in word for word in words):
            self._certify(pod, ip)
        changes = {
            "/etc/pdserve/tls": str(self.folder / pod / "tls"),
            "$(POD_IP)": ip, "$(POD_NAME)": pod, "/work/state": str(own), "/opt/pdserve": str(CLONE),
            "/etc/pdserve/secret/cluster_secret": str(self.folder / "secret"), "--ip=pdserve": "--ip=127.0.0.1",
        }  # fmt: skip
        changed = list(words)
        for old, new in changes.items():
            changed = [word.replace(old, new) for word in changed]
        if {"announce", "write"} & set(changed):
            changed.append(f"--account={self.folder / account}")
        return changed

    def _certify(self, pod: str, ip: str) -> None:
        """Give a pod the files of a certificate for its address, as a volume that issues them does."""
        folder, files = self.folder / pod / "tls", self._authority.sign(pod, ip)
        folder.mkdir(exist_ok=True)
        for name, path in (("tls.crt", files.cert), ("tls.key", files.key), ("ca.crt", files.ca)):
            (folder / name).write_bytes(Path(path).read_bytes())

    def _environment(self, ip: str) -> dict[str, str]:
        host, port = self._url.removeprefix("https://").split(":")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {
            **os.environ, "PATH": path, "PYTHONPATH": str(CLONE), "PDSERVE_PYTHON": sys.executable, "POD_IP": ip,
            "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port,
        }  # fmt: skip

    def wait_for_instances(self, *names: str) -> None:
        """Return when the scheduler has exactly these, all living."""
        deadline, found = time.monotonic() + START_TIMEOUT_S, {}
        while time.monotonic() < deadline:
            found = {each["name"]: each["state"] for each in self.client.get("/ready").json()["instances"]}
            if found == dict.fromkeys(names, "living"):
                return
            time.sleep(0.05)
        raise AssertionError(f"{found} and not {names}")


@contextmanager
def kube_processes(
    folder: Path, model: Path, flags: Sequence[str], values: Object | None = None
) -> Iterator[KubeProcesses]:
    """Yield a release that is installed and has no pod yet."""
    kube, authority = Cluster(), Authority(folder / "authority")
    with (
        serving(kube, authority.sign("api")) as url,
        KubeProcesses(folder, model, kube, url, authority, flags, values or {}) as cluster,
    ):
        yield cluster
