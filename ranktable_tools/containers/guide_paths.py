"""`deploy/link_guide_paths DIR`: create the folder layout of the guide's package as links into this clone.

    DIR/AscendCloud/AscendCloud-LLM/llm_tools/PD_separate                     -> deploy/PD_separate
    DIR/AscendCloud/AscendCloud-LLM/llm_inference/ascend_vllm/build_image.sh  -> deploy/build_image.sh
    DIR/AscendCloud-LLM                                                       -> AscendCloud/AscendCloud-LLM

The guide runs `sh AscendCloud-LLM/...` in its package's folder AscendCloud, and `cd ./AscendCloud/AscendCloud-LLM/...`
in the folder above that; with the last link both work in DIR.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ranktable_tools.arguments import OneLineParser
from ranktable_tools.errors import RanktableError

_PROG = "link_guide_paths"
_PACKAGE = "AscendCloud/AscendCloud-LLM"
_EPILOG = """\
Then the guide's commands run in DIR as printed, from `cd ./AscendCloud/AscendCloud-LLM/llm_inference/ascend_vllm/` on
(these links replace the vendor's package, which the guide unzips before that). A second run changes nothing.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit status: 0, or 2 if a path exists already or cannot be created."""
    parser = OneLineParser(prog=_PROG, description="Lay out the guide's paths in DIR, as links.", epilog=_EPILOG)
    parser.add_argument("folder", metavar="DIR", help="created if missing")
    clone = Path(__file__).resolve().parents[2]
    try:
        folder = Path(parser.parse_args(argv).folder)
        link_paths(folder, clone)
    except RanktableError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 2
    tools = shlex.quote(str(folder.absolute() / _PACKAGE / "llm_tools"))
    print(f"Next, in {folder}:\n  export LLM_TOOLS_PATH={tools}")
    if shutil.which("python") is None:
        print("  (the guide uses `python`, which is missing here: make it a link to python3)")
    return 0


def link_paths(folder: Path, clone: Path) -> None:
    """Make the links, keeping correct ones. Raises RanktableError naming a path that exists already."""
    links = guide_links(clone)
    for name, target in links.items():
        _check_free(folder / name, target)
    try:
        for name, target in links.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_symlink():
                path.symlink_to(target)
    except OSError as error:
        raise RanktableError(f"{error.filename2 or error.filename}: cannot be created: {error.strerror}") from error


def guide_links(clone: Path) -> Mapping[str, str]:
    """Return each path of the guide and its target."""
    return {
        f"{_PACKAGE}/llm_tools/PD_separate": str(clone / "deploy" / "PD_separate"),
        f"{_PACKAGE}/llm_inference/ascend_vllm/build_image.sh": str(clone / "deploy" / "build_image.sh"),
        "AscendCloud-LLM": _PACKAGE,
    }


def _check_free(path: Path, target: str) -> None:
    try:
        if path.is_symlink() and os.readlink(path) == target:
            return
        taken = path.is_symlink() or path.exists()
    except OSError as error:
        raise RanktableError(f"{path}: cannot be examined: {error.strerror}") from error
    if taken:
        what = f"a link to {os.readlink(path)}" if path.is_symlink() else "there already"
        raise RanktableError(f"{path}: is {what}, but must be a link to {target}: move it, or choose another folder")


if __name__ == "__main__":
    raise SystemExit(main())
