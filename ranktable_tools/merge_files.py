"""Run merge and merge-local: read the files, write one, print what was saved. Both command lines call these."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ranktable_tools.any_file import read_table
from ranktable_tools.dialects import modelarts
from ranktable_tools.file_names import MERGED_GLOBAL, MERGED_LOCAL
from ranktable_tools.generate import tensor_parallel_note
from ranktable_tools.merge import NamedPart, check_enough, merge
from ranktable_tools.merge_local import NamedInstance, instance_of, merge_local
from ranktable_tools.rules.rule import RuleOptions
from ranktable_tools.save_tables import check_inputs, save
from ranktable_tools.table_file import read_part
from ranktable_tools.tables import GlobalTable, Table

Say = Callable[[str], None]


def merge_files(paths: Sequence[str], save_dir: str, say: Say, *, share_devices: bool = False) -> GlobalTable:
    """Merge the global tables in `paths` into one file in `save_dir`; return the merged table."""
    check_enough(paths)
    check_inputs("--global-ranktable-list", paths, [Path(save_dir, MERGED_GLOBAL)])
    parts = [NamedPart(path, read_part(path, share_devices=share_devices)) for path in paths]
    table = merge(parts, share_devices=share_devices)
    for path in save(save_dir, [(MERGED_GLOBAL, modelarts.global_text(table))]):
        say(f"Save {path}")
    note = tensor_parallel_note([len(one.server.devices) for one in table.instances if one.server.devices])
    if note is not None:
        say(f"Note: {note}")
    say(f"Merge {len(paths)} global ranktable successful.")
    return table


def merge_local_files(paths: Sequence[str], save_dir: str, say: Say) -> Table:
    """Join the local tables in `paths` into one instance over several servers, in `save_dir`; return its table."""
    check_enough(paths, "local")
    check_inputs("--local-ranktable-list", paths, [Path(save_dir, MERGED_LOCAL)])
    shared = RuleOptions(share_devices=True)
    read = [NamedInstance(path, instance_of(path, read_table(path, rules=shared).reading.table)) for path in paths]
    table = merge_local(read)
    for path in save(save_dir, [(MERGED_LOCAL, modelarts.write(table))]):
        say(f"Save {path}")
    say(f"Merge {len(paths)} local ranktable successful.")
    return table
