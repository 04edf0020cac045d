"""Parse the instances and links of a scheduler's metrics page."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.client import Sample

_ESCAPED = re.compile(r"\\(.)")


@dataclass(slots=True)
class LinkRow:
    """The links of one instance to one peer, as the sender reports them; missing figures are None."""

    peer: str
    transport: str = ""
    up: bool = False
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    failures: int = 0
    fallbacks: int = 0
    passed_over: list[str] = field(default_factory=list)
    impossible: str = ""


@dataclass(slots=True)
class InstanceRow:
    """One instance of the table; `name` is its role and its index among instances of that role, such as `prefill-0`."""

    name: str
    role: str
    address: str
    state: str
    used: float | None = None
    total: float | None = None
    running: float | None = None
    waiting: float | None = None
    digests: bool | None = None
    engine: str = ""
    links: dict[str, LinkRow] = field(default_factory=dict)

    def link(self, peer: str) -> LinkRow:
        """Return the row of the link to a peer, created at its first sample."""
        return self.links.setdefault(peer, LinkRow(peer))


def read_table(samples: Sequence[Sample]) -> str | None:
    """Return version and digest of the table in use, such as `1 (3f2a91c0)`; None where the page has none."""
    for sample in samples:
        if sample.name == "pdserve_table_version" and sample.labels.get("digest"):
            return f"{sample.value:.0f} ({sample.labels['digest'][:8]})"
    return None


def read_roles_gone(samples: Sequence[Sample]) -> dict[str, str]:
    """Return the roles that no living instance has, and what happens to requests meanwhile: `fail` or `local`."""
    gone = [sample.labels for sample in samples if sample.name == "pdserve_role_gone" and sample.value]
    return {labels.get("role", "?"): labels.get("when_gone", "?") for labels in gone}


def read_page(samples: Sequence[Sample]) -> tuple[InstanceRow, ...]:
    """Return the instances in table order; link peers are given by name where the table has them."""
    seen: Counter[str] = Counter()
    by_id: dict[str, InstanceRow] = {}
    for sample in samples:
        if sample.name == "pdserve_instance_info":
            role = sample.labels["role"]
            name = sample.labels.get("name") or f"{role}-{seen[role]}"
            found = InstanceRow(name, role, sample.labels["address"], sample.labels["state"])
            found.digests = {"on": True, "off": False}.get(sample.labels.get("kv_digests", ""))
            found.engine = sample.labels.get("engine", "")
            by_id[sample.labels["instance"]] = found
            seen[role] += 1
    for sample in samples:
        instance = by_id.get(sample.labels.get("instance", ""))
        if instance is not None:
            _take(instance, sample, by_id)
    return tuple(by_id.values())


def _take(instance: InstanceRow, sample: Sample, by_id: Mapping[str, InstanceRow]) -> None:
    peer_id = _unescape(sample.labels.get("peer", ""))
    peer = by_id[peer_id].name if peer_id in by_id else peer_id
    match sample.name:
        case "pdserve_kv_blocks_used":
            instance.used = sample.value
        case "pdserve_kv_blocks_total":
            instance.total = sample.value
        case "pdserve_running":
            instance.running = sample.value
        case "pdserve_waiting":
            instance.waiting = sample.value
        case "pdserve_link_up":
            instance.link(peer).transport = sample.labels.get("transport", "")
            instance.link(peer).up = bool(sample.value)
        case "pdserve_link_round_trip_seconds":
            instance.link(peer).round_trip_s = sample.value
        case "pdserve_link_bandwidth_bytes_per_second":
            instance.link(peer).bytes_per_s = sample.value
        case "pdserve_link_failures_total":
            instance.link(peer).failures = int(sample.value)
        case "pdserve_link_fallbacks_total":
            instance.link(peer).fallbacks = int(sample.value)
        case "pdserve_link_impossible":
            instance.link(peer).impossible = _unescape(sample.labels.get("reason", "?"))
        case "pdserve_link_passed_over":
            reason = _unescape(sample.labels.get("reason", ""))
            instance.link(peer).passed_over.append(f"{sample.labels.get('transport', '?')}: {reason}")


def _unescape(label: str) -> str:
    return _ESCAPED.sub(lambda match: " " if match[1] == "n" else match[1], label)
