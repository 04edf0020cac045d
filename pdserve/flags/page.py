"""`python -m pdserve.flags.page`: docs/flags.md, from the table. A test keeps the page as this prints it."""

import sys
from collections.abc import Iterator, Sequence
from typing import Final

from pdserve.flags.absent_rows import ABSENT_ROWS
from pdserve.flags.engine_args_rows import ENGINE_ARGS_ROWS
from pdserve.flags.engine_rows import BATCH_FLAGS, MEMORY_FLAGS, MODEL_FLAGS, RANK_FLAGS
from pdserve.flags.recent_rows import RECENT_ROWS
from pdserve.flags.row import FlagVerdict, Takes, VllmFlag
from pdserve.flags.server_rows import SERVER_ROWS
from pdserve.variables import VARIABLES

_HEAD: Final = """\
# Flags

Made by `python -m pdserve.flags.page > docs/flags.md`: edit the rows in `pdserve/flags/`, not this page.

## vLLM's flags

`pdserve serve`, `pdserve up`, `pdserve run-batch`, `deploy/PD_separate/start_servers.sh` and `python -m pdserve.launch`
take the engine and server flags of vLLM 0.5 and 0.6, and those of the fields of 0.33's `EngineArgs`, as `--flag value`,
`--flag=value`, and with `_` for `-`. Each is
one of three things ([batch.md](batch.md) has those of vLLM's `run-batch` alone):

- **supported**: it does what it does there. `pdserve serve --help` lists these and our own.
- **no effect**: taken, so that a line that works there works here. One notice at the start names all of them with the
  reason. Where values are listed, any other is refused.
- **refused**: exit status 2 with the reason, because what it asks for would not happen.

A flag that nobody knows is refused with the one that is most like it. Flags of the front door on a prefill or decode
instance have no effect there, and one notice says so; the scheduler takes every engine flag and uses the model, its
length and its names.
"""

_TAIL: Final = """\
## A file of flags

Every `pdserve` and `ranktable` command takes `--config cluster.yaml`, and so do start_servers.sh, pd_ranktable_tools,
docker_run.sh and build_image.sh: each flag is a key, without its dashes.

    model: /models/Qwen3-0.6B
    served-model-name: [qwen3, default]
    port: 9000
    prefill: 2
    decode: 2
    kv-cache-memory: 4GiB
    enable-prefix-caching: false
    prefill-server-list: ["4,5", "6,7"]     # ranktable gen: two instances
    ports: 8088,8089,8090

- What is typed wins over a variable of the environment, and that over the file.
- One file is for all commands: a key that only another of them has is passed over. A key that none has is exit status 2
  with its line and the nearest one.
- `true` and `false` are for switches. Lists are for flags that take several values; what is typed takes their place.
- vLLM's flags are keys too, with the same three endings; a refusal says the line.
- The file is at most 64 KiB of one flat mapping. A key twice, an alias, a tag or anything nested is refused with its
  line: nothing in a file is ever constructed from it.
- `ranktable doctor` finds the table of the file (`global-rank-table`, `node-ports`) as start_servers.sh does.
- The environment's variables that are flags: GLOBAL_RANK_TABLE_FILE_PATH (`global-rank-table`), NODE_PORTS
  (`node-ports`), USE_OPENAI (`use-openai`), PDSERVE_RUN_DIR (`run-dir`).

## Tab completion

`pip install 'pdserve[completion]'` brings argcomplete; then, in `~/.bashrc` or (after `compinit`) `~/.zshrc`:

    eval "$(register-python-argcomplete pdserve)"
    eval "$(register-python-argcomplete ranktable)"

Commands, flags, the values a flag may have, and files are completed. argcomplete and not shtab: shtab prints a script
with every flag of every command, which answers faster, but is wrong after an update until it is printed again, and all
commands are imported to print it; argcomplete runs `pdserve` at each TAB and makes the parser of one command. Without
it nothing changes. `sh .../start_servers.sh` is a line of `sh`, which no shell completes.

## Variables

A variable whose name begins with `PDSERVE_` and is near one of these is refused, exit status 2, with the name that was
meant: `PDSERVE_API_KYE` would serve everyone. Any other is one warning; those that Kubernetes sets for a service whose
name begins with `pdserve` pass.

"""

_PARTS: Final[tuple[tuple[str, Sequence[VllmFlag]], ...]] = (
    ("Model", MODEL_FLAGS),
    ("Memory", MEMORY_FLAGS),
    ("Batches", BATCH_FLAGS),
    ("Ranks", RANK_FLAGS),
    ("HTTP server", SERVER_ROWS),
    ("Adapters, drafts, pictures, traces", ABSENT_ROWS),
    ("Later than 0.6, not all of them", RECENT_ROWS),
    ("What else EngineArgs of 0.33 has", ENGINE_ARGS_ROWS),
)
_SHOWN: Final = {
    Takes.NOTHING: "", Takes.ONE: " VALUE", Takes.MAYBE: " [true\\|false]", Takes.MANY: " VALUE ...",
}  # fmt: skip


def page() -> str:
    """Return the whole page."""
    variables = "\n".join(
        ("| variable | |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in VARIABLES.items()))
    )
    return "\n".join((_HEAD, *(_part(title, rows) for title, rows in _PARTS), f"{_TAIL}{variables}\n"))


def _part(title: str, rows: Sequence[VllmFlag]) -> str:
    lines = "\n".join(_line(row) for verdict in FlagVerdict for row in rows if row.verdict is verdict)
    return f"### {title}\n\n| flag | here | |\n|---|---|---|\n{lines}\n"


def _line(row: VllmFlag) -> str:
    name = f"`{row.name}{_SHOWN[row.takes]}`" + (f", `{row.short}`" if row.short else "")
    return f"| {name} | {row.verdict.value} | {'; '.join(_told(row))} |"


def _told(row: VllmFlag) -> Iterator[str]:
    if row.becomes:
        yield f"as `{row.becomes}`"
    if row.only:
        yield f"only {', '.join(f'`{value}`' for value in row.only)}"
    if row.why:
        yield row.why


if __name__ == "__main__":
    sys.stdout.write(page())
