"""`deploy/build_image.sh`: build the inference image on a base image, as the guide does."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ranktable_tools.arguments import OneLineParser
from ranktable_tools.containers.base_image import BaseImage, inspect_image, parse_version
from ranktable_tools.containers.docker import replace_by_docker
from ranktable_tools.containers.image_plan import IMAGE_KINDS, ImagePlan, plan_image
from ranktable_tools.containers.vision import VISION_URL, check_tag, choose_tag, remote_tags, vision_of
from ranktable_tools.errors import RanktableError

_PROG = "build_image.sh"
_IMAGE = re.compile(r"[a-z0-9]([A-Za-z0-9._/:@-]{0,254}[A-Za-z0-9])?")
_OF_ASCEND = re.compile("cann|ascend", re.IGNORECASE)
_NEWEST = ""
# Only the names are on the command line: docker takes the values from the environment.
_PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL",
              "TORCH_INDEX_URL")  # fmt: skip
_EPILOG = """\
First `docker run` finds out what the base image contains. If it has torch, that torch is kept: it must be 2.10 or newer
and, on Ascend, match the image's torch_npu. If not, the version in constraints.txt is installed. An incompatible
combination is an error before anything is built. Without docker, --print assumes that the base image has no torch, and
that it has CANN if its name contains cann or ascend or --device=ascend is set.
Exit status: docker's, or 2 for bad input.

examples:
  build_image.sh --base-image=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12 --image-name=pdserve
  build_image.sh --base-image=python:3.12-slim-bookworm --image-name=pdserve:cpu
  build_image.sh --base-image=python:3.12-slim-bookworm --image-name=pdserve:cuda --device=cuda --print
  build_image.sh --config cluster.yaml                  each flag is a key there; needs PyYAML
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return 2 for bad input, 0 with --print; else docker replaces this process."""
    try:
        arguments = command_parser().parse_args(argv)
        clone = Path(__file__).resolve().parents[2]
        for flag, name in (("--base-image", arguments.base_image), ("--image-name", arguments.image_name)):
            if _IMAGE.fullmatch(name) is None:
                raise RanktableError(f"{flag} {name!r} is not an image name")
        plan = plan_image(_base_image(arguments), pinned_version(clone, "torch"), arguments.device)
        tag = _vision_tag(arguments, plan)
        for note in (*plan.notes, *([f"torchvision_npu {tag}"] if tag else [])):
            print(f"{_PROG}: {note}", file=sys.stderr)
        command = build_command(plan, arguments.image_name, clone, tag, arguments.torchvision_npu_url, os.environ)
        print(shlex.join(command), flush=True)
        if not arguments.print:
            replace_by_docker(command)
    except RanktableError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 2
    return 0


def build_command(
    plan: ImagePlan, image: str, clone: Path, tag: str | None, url: str, environ: Mapping[str, str]
) -> list[str]:
    """Return the `docker build` command line; the clone is its context."""
    values = {"BASE_IMAGE": plan.base.name, "TORCH": plan.torch.release}
    if plan.torch_npu is not None:
        values["TORCH_NPU"] = plan.torch_npu.text.partition("+")[0]
    if tag is not None:
        values |= {"TORCHVISION_NPU_TAG": tag, "TORCHVISION": vision_of(plan.torch), "TORCHVISION_NPU_URL": url}
    given = [f"--build-arg={name}={value}" for name, value in values.items()]
    passed = [f"--build-arg={name}" for name in _PASSED_ON if environ.get(name)]
    file = clone / "deploy" / "docker" / f"Dockerfile.{plan.kind}"
    return ["docker", "build", f"--file={file}", *given, *passed, f"--tag={image}", str(clone)]


def pinned_version(clone: Path, name: str) -> str:
    """Return the version pinned in constraints.txt. Raises RanktableError if there is none."""
    path = clone / "constraints.txt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RanktableError(f"{path}: cannot be read: {error.strerror}") from error
    found = [line.partition("==")[2].strip() for line in lines if line.startswith(f"{name}==")]
    if not found:
        raise RanktableError(f"{path}: has no line {name}==VERSION")
    return found[0]


def command_parser() -> OneLineParser:
    """Return the parser of the command line, also for callers that inspect its flags."""
    parser = OneLineParser(prog=_PROG, description="Build the inference image.", epilog=_EPILOG)
    parser.add_argument("--base-image", required=True, metavar="IMAGE", help="the base image")
    parser.add_argument("--image-name", required=True, metavar="NAME", help="the name of the new image")
    parser.add_argument(
        "--with-torchvision-npu", nargs="?", const=_NEWEST, metavar="TAG",
        help="ascend: also build torchvision_npu (default: the newest tag for the image's torch)",
    )  # fmt: skip
    parser.add_argument("--torchvision-npu-url", default=VISION_URL, metavar="URL", help=f"default: {VISION_URL}")
    parser.add_argument(
        "--device", choices=IMAGE_KINDS,
        help="default: ascend if the base image has CANN, cuda if its torch is a CUDA build, else cpu",
    )  # fmt: skip
    parser.add_argument(
        "--print", action="store_true", help="print the docker build line and build nothing; needs no docker"
    )
    return parser


def _base_image(arguments: argparse.Namespace) -> BaseImage:
    """Probe the base image; with --print and without docker, guess its contents from its name and print a note."""
    name: str = arguments.base_image
    try:
        return inspect_image(name)
    except RanktableError as error:
        if not arguments.print:
            raise
        has_cann = arguments.device == "ascend" or (arguments.device is None and _OF_ASCEND.search(name) is not None)
        held = "CANN and no torch" if has_cann else "no CANN and no torch"
        print(f"{_PROG}: {error}: {name} is assumed to have Python 3.11, {held}", file=sys.stderr)
        return BaseImage(name, python=parse_version("3.11"), has_cann=has_cann)


def _vision_tag(arguments: argparse.Namespace, plan: ImagePlan) -> str | None:
    requested: str | None = arguments.with_torchvision_npu
    if requested is None:
        return None
    if plan.kind != "ascend":
        raise RanktableError(f"--with-torchvision-npu is for Ascend, but the image is for {plan.kind}: omit it")
    if plan.base.torchvision_npu is not None:
        have = plan.base.torchvision_npu.text
        raise RanktableError(
            f"--base-image {plan.base.name} already has torchvision_npu {have}: omit --with-torchvision-npu"
        )
    if requested != _NEWEST:
        return check_tag(requested, plan.torch)
    return choose_tag(remote_tags(arguments.torchvision_npu_url), plan.torch)


if __name__ == "__main__":
    raise SystemExit(main())
