"""The table of all checks: the name on the screen, and the function."""

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
from ranktable_tools.doctor.case import Case
from ranktable_tools.doctor.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the screen."""

    name: str
    run: Callable[[Case], Verdict]


CHECKS = (
    Check("tables", tables.check_tables),
    Check("address", network.check_address),
    Check("secret", tables.check_secret),
    Check("variables", tables.check_variables),
    Check("ports", network.check_ports),
    Check("reach", network.check_reach),
    Check("no_proxy", network.check_proxy),
    Check("cores", cores.check_cores),
    Check("cards", cards.check_cards),
    Check("card health", cards.check_card_health),
    Check("card users", cards.check_card_users),
    Check("versions", versions.check_versions),
    Check("container", container.check_container),
    Check("device links", device_network.check_device_links),
    Check("device TLS", device_network.check_tls),
    Check("device pairs", device_network.check_device_pairs),
    Check("docker", host.check_docker),
    Check("ip_forward", host.check_ip_forward),
    Check("LLM_TOOLS_PATH", tables.check_llm_tools_path),
    Check("scheduler", cluster.check_scheduler),
    Check("model", cluster.check_model),
    Check("links", cluster.check_links),
)
