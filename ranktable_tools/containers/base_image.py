"""Find out what a base image contains: Python, torch, CANN. Nothing is imported: torch_npu would need a driver."""

import re
from dataclasses import dataclass

from ranktable_tools.containers.docker import docker_output
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
"""The script that runs in the base image: for any POSIX shell; it uses python3 if present."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version as text and as numbers."""

    text: str
    numbers: tuple[int, int, int]

    @property
    def minor(self) -> tuple[int, int]:
        """Major and minor number."""
        return self.numbers[:2]

    @property
    def release(self) -> str:
        """The version without the build: 2.13.0 of 2.13.0+cpu."""
        return ".".join(map(str, self.numbers))


@dataclass(frozen=True, slots=True)
class BaseImage:
    """The contents of a base image; None for what it does not have."""

    name: str
    python: Version | None = None
    torch: Version | None = None
    torch_npu: Version | None = None
    torchvision: Version | None = None
    torchvision_npu: Version | None = None
    has_cann: bool = False


def inspect_image(name: str) -> BaseImage:
    """Return the image's contents, pulling it if needed. Raises RanktableError if docker cannot run it."""
    text = docker_output("run", "--rm", "--network=none", "--entrypoint", "sh", name, "-c", PROBE, timeout_s=TIMEOUT_S)
    return parse_probe(name, text)


def parse_probe(name: str, text: str) -> BaseImage:
    """Parse the output of PROBE. Raises RanktableError for any other text."""
    fields = dict(line.strip().partition("=")[::2] for line in text.splitlines() if "=" in line)
    if fields.get("image") != "asked":
        raise RanktableError(f"--base-image {name}: its shell printed no result")
    versions = {key: parse_version(fields[key]) for key in ("python", *_NAMES) if key in fields}
    return BaseImage(name, **versions, has_cann="cann" in fields)


def parse_version(text: str) -> Version:
    """Parse 2.13.0, 2.13.0+cpu, 2.13.0.post1. Raises RanktableError for anything that is not a version."""
    match = _VERSION.match(text)
    if match is None:
        raise RanktableError(f"{text[:40]!r} is not a version")
    return Version(text, (int(match[1]), int(match[2]), int(match[3] or 0)))
