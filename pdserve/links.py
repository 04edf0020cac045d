"""`pdserve links`: measure each P-D pair's KV link now, and explain why no better transport is in use."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.admin_client import NoAdminSocket, connect_admin, measure_links
from pdserve.client import Client
from pdserve.cluster_page import InstanceRow, LinkRow, read_page
from pdserve.flags.parser import CommandParser
from pdserve.status_line import StatusLine
from pdserve.target_cluster import TargetCluster, add_where, find
from pdserve.text_table import on_or_off, printable, text_table
from scheduler.links.probe import MAX_MEASURE_BYTES
from wire.errors import ConfigError, Unavailable

_TIMEOUT_S = 3.0
_MIB = 2**20
_HEADER = (
    "PREFILL", "DECODE", "TRANSPORT", "STATE", "ROUND TRIP", "BANDWIDTH", "DIGESTS", "FAILURES", "FALLBACKS",
    "WHY NOT BETTER",
)  # fmt: skip
EPILOG = """\
Every prompt's KV is sent from a prefill to a decode instance over a link. For each pair this measures the link that a
prompt would use now, with bytes that reach no KV pool, one pair after another. Requests are served meanwhile and share
the link. A missing link is established.

  TRANSPORT       the one in use: the best working one that both ends offer
  ROUND TRIP      the shortest of five
  BANDWIDTH       of --mib MiB from prefill to decode, with digests where they are on
  DIGESTS         whether each KV frame is checked: off only where both ends have --no-kv-digests
  FAILURES        how often this pair's link was lost; FALLBACKS: how often a worse transport was used
  WHY NOT BETTER  for each better transport, why it is not in use, with both rates if it measured slower; or why
                  the pair could not be measured

The scheduler measures only at the request of its own user or root, on its own host. Elsewhere, --url shows the last
measurement, and only those better transports that the prefill instance offers. Exit status: 0 when every
pair was measured, else 1.

examples:
  pdserve links                                 the cluster of `pdserve up`, else the one on port 9000
  pdserve links --url http://10.0.0.18:9000 --mib 256
  pdserve links --mib 0                         send nothing, only show the links
  pdserve links --json | jq '.links[] | {prefill, decode, transport, bytes_per_s}'
"""


@dataclass(slots=True)
class LinksReport:
    """All links; `note` explains why they were not measured now, empty when they were."""

    links: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    @property
    def whole(self) -> bool:
        """Whether every pair was measured as requested."""
        return not self.note and not any(link["error"] for link in self.links)


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when every pair was measured, 1 when one was not."""
    parser = CommandParser(
        prog="pdserve links", description="Measure the KV link of every prefill-decode pair.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_where(parser)
    maximum = MAX_MEASURE_BYTES // _MIB
    parser.add_argument(
        "--mib", type=int, default=64, help=f"MiB sent over each link, 0 to {maximum}; 0 sends nothing (default: 64)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.mib <= maximum:
        raise ConfigError(f"--mib {arguments.mib} is not in 0..{maximum}")
    where = find(arguments.url, arguments.run_dir)
    report = _report(where, arguments.mib * _MIB)
    if arguments.json:
        fields = {"url": where.base_url, "mib": arguments.mib, "note": report.note, "links": report.links}
        print(json.dumps(fields, indent=2))
    else:
        _print(where, report, arguments.mib)
    return 0 if report.whole else 1


def _report(where: TargetCluster, num_bytes: int) -> LinksReport:
    """Measure, or take the figures of /metrics if measuring is not permitted. Raises Unavailable without a response."""
    try:
        connection = connect_admin(where.base_url)
    except NoAdminSocket as error:
        return LinksReport(_from_page(where), "" if num_bytes == 0 else str(error))
    report = LinksReport()
    with connection, StatusLine() as progress:
        for message in measure_links(connection, num_bytes):
            if "measuring" in message and num_bytes:
                progress.show(_measuring_note(message, num_bytes))
            elif "link" in message:
                report.links.append(message["link"])
    return report


def _measuring_note(message: dict[str, Any], num_bytes: int) -> str:
    """Return the progress line of the pair whose measurement starts now."""
    pair = message["measuring"]
    number = f"{message['number']} of {message['of']}"
    return printable(f"measuring {number} with {num_bytes // _MIB} MiB: {pair['prefill']} to {pair['decode']}")


def _from_page(where: TargetCluster) -> list[dict[str, Any]]:
    try:
        instances = read_page(Client(where.base_url, timeout_s=_TIMEOUT_S).metrics())
    except (Unavailable, UnicodeDecodeError) as error:
        raise Unavailable(where.nothing_there) from error
    if not instances:
        raise Unavailable(f"the server at {where.base_url} is not a pdserve scheduler: its /metrics lists no instances")
    return list(_instance_pairs(instances))


def _instance_pairs(instances: Sequence[InstanceRow]) -> Iterator[dict[str, Any]]:
    for prefill in (one for one in instances if one.role == "prefill"):
        for decode in (one for one in instances if one.role == "decode"):
            lost = [one for one in (prefill, decode) if one.state != "living"]
            link = prefill.links.get(decode.name, LinkRow(decode.name))
            if link.impossible:  # the page's other figures are from before the instance restarted
                link = LinkRow(decode.name, impossible=link.impossible)
            yield {
                "prefill": prefill.name,
                "prefill_address": prefill.address,
                "decode": decode.name,
                "decode_address": decode.address,
                "transport": link.transport or None,
                "state": "up" if link.up else "down" if link.transport else None,
                "round_trip_s": link.round_trip_s,
                "bytes_per_s": link.bytes_per_s,
                "bytes_sent": None,
                "digests": None if None in (prefill.digests, decode.digests) else prefill.digests or decode.digests,
                "failures": link.failures,
                "fallbacks": link.fallbacks,
                "passed_over": link.passed_over,
                "not_offered": [],
                "error": "; ".join(f"{one.address} is {one.state}" for one in lost) or link.impossible,
            }


def _print(where: TargetCluster, report: LinksReport, mib: int) -> None:
    print(f"{where.base_url}  " + (f"{mib} MiB over each link" if mib and not report.note else "as last measured"))
    if report.links:
        for line in text_table(_HEADER, [_row(link) for link in report.links]):
            print(line)
    else:
        print("no pair of a prefill and a decode instance: no KV is sent over a link here")
    if report.note:
        sys.stdout.flush()
        print(f"not measured now: {printable(report.note)}", file=sys.stderr)


def _row(link: dict[str, Any]) -> tuple[str, ...]:
    why = [*([f"not measured: {link['error']}"] if link["error"] else []), *link["passed_over"], *link["not_offered"]]
    return (
        f"{link['prefill']} {link['prefill_address']}",
        f"{link['decode']} {link['decode_address']}",
        link["transport"] or "-",
        link["state"] or "-",
        _format_time(link["round_trip_s"]),
        _rate(link["bytes_per_s"]),
        on_or_off(link["digests"]),
        _count(link["failures"]),
        _count(link["fallbacks"]),
        "; ".join(why) or "-",
    )


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _format_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "-"
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"
