"""The torchvision_npu for a torch version: the tag v0.N.x-... is for torchvision 0.N, which needs one torch version.

torchvision 0.N needs torch 2.(N-15) (0.16: 2.1, 0.25: 2.10, 0.28: 2.13, as their packages declare).
"""

import re
import subprocess
from collections.abc import Sequence

from ranktable_tools.containers.base_image import Version
from ranktable_tools.errors import RanktableError

VISION_URL = "https://gitee.com/ascend/vision.git"
_OFFSET = 15
_TAG = re.compile(r"v?0\.([0-9]{1,4})\.([0-9]{1,4})(?:[-.]([0-9A-Za-z.]+))?")
_TIMEOUT_S = 60.0
_MAX_SHOWN = 8


def vision_of(torch: Version) -> str:
    """Return the torchvision for a torch, such as 0.28 for 2.13. Raises RanktableError for an unknown torch."""
    major, minor = torch.minor
    if major != 2:
        raise RanktableError(f"no torchvision is known for torch {torch.text}, only for torch 2.x")
    return f"0.{minor + _OFFSET}"


def check_tag(tag: str, torch: Version) -> str:
    """Return a given tag. Raises RanktableError naming both versions if it is for another torch."""
    match = _TAG.fullmatch(tag)
    if match is None:
        raise RanktableError(f"--with-torchvision-npu={tag}: write a tag of torchvision_npu, like v0.16.0-6.0.rc3")
    if f"0.{match[1]}" != vision_of(torch):
        raise RanktableError(
            f"--with-torchvision-npu={tag} is for torch 2.{int(match[1]) - _OFFSET}, "
            f"but the image's torch is {torch.text}: use a tag v{vision_of(torch)}.*, "
            "or omit the tag to choose it automatically (--with-torchvision-npu)"
        )
    return tag


def choose_tag(tags: Sequence[str], torch: Version) -> str:
    """Return the newest tag for this torch. Raises RanktableError listing the newest existing tags."""
    fitting = [tag for tag in tags if (match := _TAG.fullmatch(tag)) and f"0.{match[1]}" == vision_of(torch)]
    if not fitting:
        known = sorted((tag for tag in tags if _TAG.fullmatch(tag)), key=_order)
        raise RanktableError(
            f"there is no torchvision_npu v{vision_of(torch)}.* for the image's torch {torch.text}; "
            f"the newest are {', '.join(known[-_MAX_SHOWN:]) or 'not known'}: build without --with-torchvision-npu"
        )
    return max(fitting, key=_order)


def remote_tags(url: str) -> list[str]:
    """Return the tags of a git repository. Raises RanktableError if git fails."""
    if url.startswith("-"):
        raise RanktableError(f"--torchvision-npu-url {url!r} is not an address")
    remedy = "pass the tag: --with-torchvision-npu=TAG"
    try:
        done = subprocess.run(
            ["git", "ls-remote", "--tags", "--refs", url], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RanktableError(f"git ls-remote {url}: did not exit within {_TIMEOUT_S:g} s; {remedy}") from error
    except OSError as error:
        raise RanktableError(f"git cannot be run: {error.strerror}; {remedy}") from error
    if done.returncode != 0:
        stderr = " ".join(done.stderr.split())[:200]
        raise RanktableError(f"git ls-remote {url}: {stderr or f'exit status {done.returncode}'}; {remedy}")
    return [line.partition("refs/tags/")[2] for line in done.stdout.splitlines() if "refs/tags/" in line]


def _order(tag: str) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the sort key of a tag: torchvision's numbers, then the suite's; 6.0.rc3 comes before 6.0.0."""
    match = _TAG.fullmatch(tag)
    assert match is not None, "only such tags are compared"
    words = (match[3] or "").split(".")
    suite = [(1, int(word)) if word.isdigit() else (0, int(re.sub(r"\D", "", word) or 0)) for word in words]
    return int(match[1]), int(match[2]), suite
