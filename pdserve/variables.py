"""pdserve's environment variables: a misspelt name is refused, since nothing else would report it."""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Final

from engine.fused.area import VARIABLE as WEIGHTS_FD
from scheduler.http.listener import SHARED_VARIABLE as SHARED_SOCKET
from telemetry.start_marks import VARIABLE as START_PIPE
from wire.errors import ConfigError

PREFIX: Final = "PDSERVE_"
VARIABLES: Final[Mapping[str, str]] = {
    "PDSERVE_API_KEY": "API keys that clients must send, one per line; also sent by `pdserve` commands",
    "PDSERVE_CACHE_DIR": "folder of prepared models and native libraries (default: `~/.cache/pdserve`)",
    "PDSERVE_CERT_FILE": "certificate that `pdserve` commands trust, for a self-signed server",
    "PDSERVE_FAILPOINTS": "for tests: the points at which a process fails (`processes/failpoints.py`)",
    "PDSERVE_NATIVE": "`off`: no native code",
    "PDSERVE_PYTHON": "the Python that the scripts of `deploy/` run",
    "PDSERVE_RUN_DIR": "folder of state and logs (`--run-dir`; default: `~/.local/state/pdserve`)",
    "PDSERVE_SECRET_FILE": "the cluster secret (default: `cluster_secret` beside the global ranktable)",
    "PDSERVE_VLLM_COMMAND": "the command of vLLM and vllm-ascend workers, with its first arguments (default: `vllm`)",
    "PDSERVE_WORKER": "`vllm` or `vllm-ascend`: `ranktable gen` lists instances as workers of that engine, and "
    "`start_servers.sh` starts them",
}
PARENT_PIPE: Final = "PDSERVE_PARENT_PIPE"
STATE_FILE: Final = "PDSERVE_STATE_FILE"
"""The same as in scheduler/observability/replacements.py."""
_OTHERS: Final = frozenset((  # read by deploy/compose.yaml and scripts/, or set by a parent
    "PDSERVE_BIND", "PDSERVE_FAULT_RESULTS", "PDSERVE_IMAGE", "PDSERVE_MODEL", "PDSERVE_PORT", PARENT_PIPE, START_PIPE,
    SHARED_SOCKET, STATE_FILE, WEIGHTS_FD,
))  # fmt: skip
_TEST_PREFIX: Final = "PDSERVE_TEST"
# Set by Kubernetes in each container for a service whose name begins with pdserve.
_KUBERNETES_SERVICE: Final = re.compile(r"PDSERVE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")
_MIN_SIMILARITY: Final = 0.75


def check_variables(environ: Mapping[str, str]) -> None:
    """Warn once, on stderr, of unknown variables. Raises ConfigError for one whose name is close to a known one.

    Child processes do not warn: their parent has.
    """
    if PARENT_PIPE in environ or START_PIPE in environ:
        return
    unknown = sorted(name for name in environ if name.upper().startswith(PREFIX) and not _is_known(name))
    for name in unknown:
        if (near := next(_close_names(name), None)) is not None:
            raise ConfigError(f"there is no variable {name}: did you mean {near}?")
    if unknown:
        print(f"warning: nothing reads {', '.join(unknown)}: docs/flags.md lists the variables", file=sys.stderr)


def _is_known(name: str) -> bool:
    is_ours = name in VARIABLES or name in _OTHERS or name.startswith(_TEST_PREFIX)
    return is_ours or _KUBERNETES_SERVICE.fullmatch(name) is not None


def _close_names(name: str) -> Iterator[str]:
    """Yield close names: similar after the prefix, or one starts with the other's words."""
    rest = name.upper().removeprefix(PREFIX)
    ours = {known.removeprefix(PREFIX): known for known in VARIABLES}
    for other, known in ours.items():
        if f"{other}_".startswith(f"{rest}_") or f"{rest}_".startswith(f"{other}_"):
            yield known
    yield from (ours[other] for other in difflib.get_close_matches(rest, ours, n=1, cutoff=_MIN_SIMILARITY))
