"""`ranktable convert`: write a table in another dialect to stdout, or with all its local tables to a folder."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ranktable_tools.any_file import ReadFile, read_table
from ranktable_tools.arguments import OneLineParser, add_command, add_dialect, add_read_options, read_options
from ranktable_tools.convert import Conversion, Converted, convert, instance_names
from ranktable_tools.dialects import modelarts
from ranktable_tools.dialects.registry import named
from ranktable_tools.errors import RanktableError
from ranktable_tools.file_names import HOST, MERGED_LOCAL, global_name, local_name
from ranktable_tools.keys import unread_keys
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.save_tables import check_inputs, check_names, save
from ranktable_tools.tables import LocalTable, Table

_EXAMPLES = """\
Write a table in another dialect. From a MindIE table with one prefill instance, the tables for pdserve:
  ranktable convert rank_table.json --to modelarts --num-prefill 1 --save-dir tables
HCCL's RANK_TABLE_FILE of one instance:
  ranktable convert global_ranktable_10.0.0.18.json --to hccl-1.0 --instance prefill-0 > hccl.json
"""


def add(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add the subcommand."""
    parser = add_command(commands, "convert", "Write a table in another dialect.")
    parser.description = _EXAMPLES
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--to", required=True, metavar="NAME", help="modelarts, hccl-1.0 or hccl-1.2")
    add_dialect(parser)
    add_read_options(parser)
    parser.add_argument("--instance", metavar="NAME", help="only this instance: prefill-0, decode-1, instance-0")
    parser.add_argument("--role", choices=("prefill", "decode"), help="the role of the table's only instance")
    parser.add_argument("--api-server", metavar="IP", help="the scheduler's address, if the table has none")
    parser.add_argument("--share-devices", action="store_true", help="let two instances share one GPU")
    parser.add_argument("--save-dir", metavar="DIR", help="write the global and all local tables here, not to stdout")
    parser.set_defaults(command=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    rules = RuleOptions(arguments.share_devices)
    opened = read_table(arguments.file, arguments.dialect, read_options(arguments), rules)
    wanted = Conversion(
        named(arguments.to), arguments.instance, arguments.role, arguments.api_server, arguments.share_devices
    )
    if arguments.save_dir is None:
        converted = convert(opened.reading.table, wanted)
        print(converted.text, end="")
        _print_notes(opened, [converted])
        return 0
    files = list(_files(opened, wanted))
    check_names([(name, owner) for name, owner, _ in files])
    check_inputs("convert", [arguments.file], [Path(arguments.save_dir, name) for name, _, _ in files])
    for path in save(arguments.save_dir, [(name, converted.text) for name, _, converted in files]):
        print(f"Save {path}")
    _print_notes(opened, [converted for _, _, converted in files])
    return 0


def _files(opened: ReadFile, wanted: Conversion) -> Iterator[tuple[str, str, Converted]]:
    """Yield the name of each file, what it describes, and its content."""
    table = opened.reading.table
    if wanted.to is not modelarts.DIALECT:
        for instance in (wanted.instance,) if wanted.instance else instance_names(table.instances):
            one = Conversion(wanted.to, instance, wanted.role, wanted.api_server, wanted.share_devices)
            yield f"{wanted.to.name}_{instance}.json", f"instance {instance}", convert(table, one)
        return
    whole = convert(table, wanted)
    if whole.table.kind == "instance":
        yield _local_file(whole.table), "the local table", whole
        return
    yield _global_file(whole), "the global table", whole
    yield from _local_files(whole.table)


def _local_file(table: Table) -> str:
    servers = table.instances[0].servers if table.instances else table.schedulers
    if len(servers) > 1:
        return MERGED_LOCAL
    return local_name(servers[0].server_ip, servers[0].device_ids or HOST)


def _global_file(whole: Converted) -> str:
    if not whole.table.schedulers:
        hosts = {server.server_ip for instance in whole.table.instances for server in instance.servers}
        if len(hosts) > 1:
            raise RanktableError(
                f"the table has {len(hosts)} hosts and no scheduler; pass the scheduler's host with --api-server IP"
            )
        return global_name(hosts.pop())
    return global_name(whole.table.schedulers[0].server_ip)


def _local_files(table: Table) -> Iterator[tuple[str, str, Converted]]:
    for name, instance in zip(instance_names(table.instances), table.instances, strict=True):
        server = instance.servers[0]
        text = modelarts.local_text(LocalTable(server))
        yield local_name(server.server_ip, server.device_ids), name, Converted(text, table, ())
    for server in table.schedulers:
        text = modelarts.local_text(LocalTable(server))
        yield local_name(server.server_ip, HOST), "the scheduler", Converted(text, table, ())


def _print_notes(opened: ReadFile, converted: Sequence[Converted]) -> None:
    unread = unread_keys(opened.document.value)
    notes = [*opened.reading.notes, *unread, *(note for one in converted for note in one.notes)]
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
