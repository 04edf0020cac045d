"""Find values used twice on one host; hosts are compared by resolving their names and addresses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ranktable_tools.addresses import HostComparer


@dataclass(frozen=True, slots=True)
class Claim:
    """One value that must be unique on its host, and its JSON path; `owner` is the number of the instance."""

    value: str
    host: str
    json_path: str
    owner: int = 0


def clashes(claims: Iterable[Claim]) -> Iterator[tuple[Claim, Claim]]:
    """Yield each claim that repeats an earlier one on the same host, with the earlier one."""
    hosts = HostComparer()
    by_spelling: dict[tuple[str, str], Claim] = {}
    by_resolved: dict[str, dict[str, Claim]] = {}
    for claim in claims:
        first = by_spelling.get((claim.value, claim.host))
        if first is None:
            first = _same_host(hosts, by_resolved.setdefault(claim.value, {}), claim)
            by_spelling[claim.value, claim.host] = claim
        if first is not None:
            yield claim, first


def _same_host(hosts: HostComparer, seen: dict[str, Claim], claim: Claim) -> Claim | None:
    """Return an earlier claim of the same host under another spelling; a table's only host is not resolved."""
    if seen.keys() == {""}:
        only = seen.pop("")
        seen.update(dict.fromkeys(hosts.resolved(only.host), only))
    elif not seen:
        seen[""] = claim
        return None
    names = hosts.resolved(claim.host)
    first = next((seen[name] for name in names if name in seen), None)
    for name in names:
        seen.setdefault(name, claim)
    return first
