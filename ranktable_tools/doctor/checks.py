"""The table of all checks: the displayed name and the function."""

from collections.abc import Callable
from dataclasses import dataclass

from ranktable_tools.doctor import (
    cards,
    cluster,
    container,
    cores,
    device_network,
    host,
    network,
    tables,
    versions,
)
from ranktable_tools.doctor.case import DoctorInput
from ranktable_tools.doctor.verdict import Verdict


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One check, one line of the output."""

    name: str
    run: Callable[[DoctorInput], Verdict]


CHECKS = (
    DoctorCheck("tables", tables.check_tables),
    DoctorCheck("address", network.check_address),
    DoctorCheck("secret", tables.check_secret),
    DoctorCheck("variables", tables.check_variables),
    DoctorCheck("ports", network.check_ports),
    DoctorCheck("reach", network.check_reach),
    DoctorCheck("no_proxy", network.check_proxy),
    DoctorCheck("cores", cores.check_cores),
    DoctorCheck("cards", cards.check_cards),
    DoctorCheck("card health", cards.check_card_health),
    DoctorCheck("card users", cards.check_card_users),
    DoctorCheck("versions", versions.check_versions),
    DoctorCheck("container", container.check_container),
    DoctorCheck("device links", device_network.check_device_links),
    DoctorCheck("device TLS", device_network.check_tls),
    DoctorCheck("device pairs", device_network.check_device_pairs),
    DoctorCheck("docker", host.check_docker),
    DoctorCheck("ip_forward", host.check_ip_forward),
    DoctorCheck("LLM_TOOLS_PATH", tables.check_llm_tools_path),
    DoctorCheck("scheduler", cluster.check_scheduler),
    DoctorCheck("model", cluster.check_model),
    DoctorCheck("links", cluster.check_links),
)
