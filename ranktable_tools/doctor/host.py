"""Check the host of the containers: docker and IP forwarding."""

from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.verdict import Verdict, not_here, ok, warn

_FORWARD = "/proc/sys/net/ipv4/ip_forward"


def check_docker(case: DoctorInput) -> Verdict:
    """Check that docker, which starts the guide's containers, is installed."""
    if case.machine.in_container:
        return not_here("this is a container")
    answer = case.machine.run_tool("docker", "-v")
    if answer is None:
        step = "yum install -y docker-engine (only the guide's containers need it)"
        return not_here("docker is not installed", step)
    if answer.status != 0:
        return warn(f"docker -v: {answer.summary}", "check the installation of docker")
    return ok(answer.summary)


def check_ip_forward(case: DoctorInput) -> Verdict:
    """Check that the kernel forwards the packets of containers with their own network."""
    value = (case.machine.text(_FORWARD) or "").strip()
    if value == "1":
        return ok("net.ipv4.ip_forward is 1")
    message = f"net.ipv4.ip_forward is {value or 'unknown'}"
    if case.machine.in_container:
        return not_here(f"{message}; this is a container: the host's setting matters")
    if case.machine.tool("docker") is None:
        return not_here(f"{message}; only containers need it")
    step = "sysctl -w net.ipv4.ip_forward=1, and the same line in /etc/sysctl.conf (not needed with --net=host)"
    return warn(message, step)
