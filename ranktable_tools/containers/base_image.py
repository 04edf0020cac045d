"""Ask a base image what it brings: Python, torch, CANN. Nothing is imported: torch_npu needs a driver then."""

import re
from dataclasses import dataclass

from ranktable_tools.containers.docker import ask
from ranktable_tools.errors import RanktableError

TIMEOUT_S = 3600.0
_NAMES = ("torch", "torch_npu", "torchvision", "torchvision_npu")
_VERSION = re.compile(r"([0-9]+)\.([0-9]+)(?:\.([0-9]+))?")
_PYTHON = (
    "import sys\n"
    "print('python=%d.%d' % sys.version_info[:2])\n"
    "from importlib import metadata\n"
    f"for name in {_NAMES!r}:\n"
    "    try:\n"
    "        print(name + '=' + metadata.version(name))\n"
    "    except metadata.PackageNotFoundError:\n"
    "        pass\n"
)
PROBE = f"""\
echo image=asked
for folder in /usr/local/Ascend/ascend-toolkit /usr/local/Ascend/cann; do
    if [ -d "$folder" ]; then echo "cann=$folder"; fi
done
python3 -c "{_PYTHON}" 2>/dev/null || true
"""
"""What runs in the base image: any POSIX shell, and python3 where there is one."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version as it was told, and its numbers."""

    text: str
    numbers: tuple[int, int, int]

    @property
    def minor(self) -> tuple[int, int]:
        """Major and minor number."""
        return self.numbers[:2]

    @property
    def release(self) -> str:
        """The version without what names a build: 2.13.0 of 2.13.0+cpu."""
        return ".".join(map(str, self.numbers))


@dataclass(frozen=True, slots=True)
class BaseImage:
    """What a base image brings; None for what is not in it."""

    name: str
    python: Version | None = None
    torch: Version | None = None
    torch_npu: Version | None = None
    torchvision: Version | None = None
    torchvision_npu: Version | None = None
    has_cann: bool = False


def ask_image(name: str, timeout_s: float = TIMEOUT_S) -> BaseImage:
    """Return what the image brings, pulled where it is not here. Raises RanktableError where docker cannot run it."""
    text = ask("run", "--rm", "--network=none", "--entrypoint", "sh", name, "-c", PROBE, timeout_s=timeout_s)
    return parse_probe(name, text)


def parse_probe(name: str, text: str) -> BaseImage:
    """Return what the answer of PROBE says. Raises RanktableError where it is none."""
    told = dict(line.strip().partition("=")[::2] for line in text.splitlines() if "=" in line)
    if told.get("image") != "asked":
        raise RanktableError(f"--base-image {name}: its shell did not answer")
    versions = {key: parse_version(told[key]) for key in ("python", *_NAMES) if key in told}
    return BaseImage(name, **versions, has_cann="cann" in told)


def parse_version(text: str) -> Version:
    """Read 2.13.0, 2.13.0+cpu, 2.13.0.post1. Raises RanktableError for what is no version."""
    match = _VERSION.match(text)
    if match is None:
        raise RanktableError(f"{text[:40]!r} is no version")
    return Version(text, (int(match[1]), int(match[2]), int(match[3] or 0)))
