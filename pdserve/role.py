"""`pdserve role`: use a running instance for prefill, for decode, or for both, without a restart."""

import argparse
import json
from collections.abc import Sequence

from pdserve.admin_client import change_role, connect_admin
from pdserve.flags.parser import CommandParser
from pdserve.target_cluster import add_where, find
from pdserve.text_table import printable
from wire.types import Role

EPILOG = """\
A role says where new prompts go: a prefill instance computes them, a decode instance generates their answers, and a
combined one does both. Every instance can do all of it. After the change new prompts follow the new role; what runs on
the instance stays there, its cached prefixes too. Nothing is loaded, and its process stays the same.

The instance keeps the role until the next change, also when the scheduler restarts; an instance that restarts gets its
role again. A new entry in the table starts with the role given there. Names stay: `prefill-0` may decode.

A change is refused if it would leave no instance to prefill or to decode, if the instance is a worker of another
engine, and if a decode instance of a model that takes images would get another role: it has no image encoder.

The scheduler accepts a change only from its own user or root, on its own host. Exit status: 0 when the instance has the
role, 2 when it cannot have it, else 1.

examples:
  pdserve role decode-1 prefill                 the cluster of `pdserve up`, else the one on port 9000
  pdserve role prefill-0 combined --url http://127.0.0.1:9100
  pdserve status                                shows the roles
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when the instance has the role."""
    parser = CommandParser(
        prog="pdserve role", description="Change the role of a running instance.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("instance", metavar="INSTANCE", help="its name as `pdserve status` shows it, such as decode-0")
    parser.add_argument("role", metavar="ROLE", choices=[role.value for role in Role], help=", ".join(Role))
    add_where(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line")
    arguments = parser.parse_args(argv)
    with connect_admin(find(arguments.url, arguments.run_dir).base_url) as connection:
        changed = change_role(connection, arguments.instance, arguments.role)
    if arguments.json:
        print(json.dumps({"instance": arguments.instance, **changed}))
    elif changed["before"] == changed["role"]:
        print(printable(f"{arguments.instance} already has the role {changed['role']}"))
    else:
        print(printable(f"{arguments.instance}: {changed['before']} -> {changed['role']}"))
    return 0
