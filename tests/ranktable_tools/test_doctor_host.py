"""The doctor's checks of docker and IP forwarding."""

from pathlib import Path

from ranktable_tools.doctor.host import check_docker, check_ip_forward
from tests.ranktable_tools.bench import Bench

FORWARD = "/proc/sys/net/ipv4/ip_forward"
DOCKER = {"-v": "Docker version 24.0.7, build afdd53b\n"}


def test_dockers_version_is_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.tool("docker", DOCKER)

    verdict = check_docker(bench.case())

    assert (verdict.result, verdict.message) == ("ok", "Docker version 24.0.7, build afdd53b")


def test_a_docker_that_is_not_running_is_a_warning(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.tool("docker", {}, other="docker: exec format error\n")

    assert check_docker(bench.case()).message == "docker -v: docker: exec format error"


def test_without_docker_the_next_step_installs_it(tmp_path: Path) -> None:
    verdict = check_docker(Bench(tmp_path).case())

    assert (verdict.result, verdict.message) == ("not here", "docker is not installed")
    assert verdict.next_step.startswith("yum install -y docker-engine")


def test_in_a_container_docker_is_left_to_the_host(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.file("/run/.containerenv", "")

    assert check_docker(bench.case()).message == "this is a container"


def test_with_docker_ip_forward_has_to_be_1(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.file(FORWARD, "0\n")
    without_docker = check_ip_forward(bench.case())
    bench.tool("docker", DOCKER)
    off = check_ip_forward(bench.case())
    bench.file(FORWARD, "1\n")
    on = check_ip_forward(bench.case())

    assert without_docker.result == "not here"
    assert (off.result, off.message) == ("warn", "net.ipv4.ip_forward is 0")
    assert off.next_step.startswith("sysctl -w net.ipv4.ip_forward=1")
    assert (on.result, on.message) == ("ok", "net.ipv4.ip_forward is 1")


def test_in_a_container_ip_forward_is_left_to_the_host(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.file("/run/.containerenv", "")
    bench.file(FORWARD, "0\n")
    bench.tool("docker", DOCKER)

    verdict = check_ip_forward(bench.case())

    assert (verdict.result, verdict.message) == (
        "not here",
        "net.ipv4.ip_forward is 0; this is a container: the host's setting matters",
    )
