"""Run docker, and query it for running containers and their cards."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ranktable_tools.containers.run_line import CARDS_LABEL
from ranktable_tools.errors import RanktableError

TIMEOUT_S = 10.0
_NPU_NODE = re.compile(r"/dev/davinci([0-9]+)")
_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Holder:
    """A running container and its cards; `all_gpus` if it has every GPU."""

    name: str
    npus: frozenset[str]
    gpus: frozenset[str]
    all_gpus: bool


def holders(timeout_s: float = TIMEOUT_S) -> list[Holder]:
    """Return the running containers of this host. Raises RanktableError if docker fails."""
    ids = docker_output("ps", "--quiet", "--no-trunc", timeout_s=timeout_s).split()
    # For a container that has exited meanwhile, docker prints an error in addition to the output for the others.
    return parse_inspect(docker_output("inspect", *ids, timeout_s=timeout_s, strict=False)) if ids else []


def parse_inspect(text: str) -> list[Holder]:
    """Return the containers in the output of `docker inspect`. Raises RanktableError for invalid output."""
    try:
        listed = json.loads(text or "[]")
        return [_parse_holder(one) for one in listed]
    except (ValueError, TypeError, AttributeError) as error:
        raise RanktableError(f"docker inspect: not a list of containers: {text[:_MAX_SHOWN]!r}") from error


def docker_output(*arguments: str, timeout_s: float = TIMEOUT_S, strict: bool = True) -> str:
    """Return the output of one docker command; unless `strict`, its exit status is ignored.

    Raises RanktableError if docker is not installed, times out, or, with `strict`, fails.
    """
    docker, shown = _docker_path(), f"docker {arguments[0]}"
    try:
        done = subprocess.run(
            [docker, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RanktableError(f"{shown}: did not exit within {timeout_s:g} s") from error
    except OSError as error:
        raise RanktableError(f"{shown}: cannot be run: {error.strerror}") from error
    if strict and done.returncode != 0:
        stderr = " ".join(done.stderr.split())[:_MAX_SHOWN]
        raise RanktableError(f"{shown}: {stderr or f'exit status {done.returncode}'}")
    return done.stdout


def replace_by_docker(words: list[str]) -> NoReturn:
    """Replace this process by docker, so that pulls and builds have no time limit and docker handles Ctrl-C."""
    os.execv(_docker_path(), words)  # noqa: S606 - an argument list, made by the caller


def _docker_path() -> str:
    docker = shutil.which("docker")
    if docker is None:
        raise RanktableError("docker is not installed here")
    return docker


def _parse_holder(one: Mapping[str, object]) -> Holder:
    host, config = _object_field(one, "HostConfig"), _object_field(one, "Config")
    variables = dict(line.partition("=")[::2] for line in map(str, _list_field(config, "Env")))
    nodes = (_NPU_NODE.fullmatch(str(node.get("PathOnHost", ""))) for node in _list_field(host, "Devices"))
    npus = {match[1] for match in nodes if match} | set(_parse_numbers(variables.get("ASCEND_VISIBLE_DEVICES", "")))
    requests = [request for request in _list_field(host, "DeviceRequests") if _is_gpu(request)]
    gpus = {str(device) for request in requests for device in _list_field(request, "DeviceIDs")}
    nvidia = variables.get("NVIDIA_VISIBLE_DEVICES", "")
    every = nvidia == "all" or any(request.get("Count") == -1 for request in requests)
    labelled = _object_field(config, "Labels").get(CARDS_LABEL)
    if labelled is not None and not npus:
        return Holder(_name(one), frozenset(), frozenset(str(labelled).split(",")), False)
    return Holder(_name(one), frozenset(npus), frozenset({*gpus, *_parse_numbers(nvidia)}), every)


def _parse_numbers(text: str) -> Iterator[str]:
    """Yield the numbers of `0,2-4`; other values of a driver's variable (all, void, UUIDs) are skipped."""
    for word in text.split(","):
        match = _RANGE.fullmatch(word.strip())
        if match:
            first = int(match[1])
            yield from map(str, range(first, int(match[2] or first) + 1))


def _is_gpu(request: Mapping[str, object]) -> bool:
    return request.get("Driver") == "nvidia" or any("gpu" in each for each in _list_field(request, "Capabilities"))


def _name(one: Mapping[str, object]) -> str:
    return str(one.get("Name") or one.get("Id")).lstrip("/")


def _object_field(value: Mapping[str, object], key: str) -> Mapping[str, object]:
    member = value.get(key)
    return member if isinstance(member, dict) else {}


def _list_field(value: Mapping[str, object], key: str) -> Sequence[Mapping[str, object]]:
    member = value.get(key)
    return member if isinstance(member, list) else []
