"""The Dockerfiles and what runs in them: linted, and run as far as possible without an engine that builds them."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from native.builder import find_library
from native.cache import library_folder
from native.libraries import RECIPES
from tests.deploy.fake_engine import fake_engine

CLONE = Path(__file__).resolve().parent.parent.parent
DOCKER = CLONE / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
# Ours need the network of a build or an image around them; docs/deploy.md describes what they do there.
SCRIPTS = sorted([*DOCKER.glob("*.sh"), *(CLONE / "deploy").glob("*.sh"), CLONE / "deploy" / "link_guide_paths"])
HADOLINT = Path(sys.executable).parent / "hadolint"
names = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix[1:])


def _run(*command: object, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], **environ}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=env, check=False)


def _instructions(dockerfile: Path, name: str) -> list[str]:
    """Return what stands after an instruction, lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", dockerfile.read_text()))
    return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")]


def test_there_is_one_for_each_device() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".ascend", ".cpu", ".cuda"]


@pytest.mark.covers("A2.41")
@names
@pytest.mark.skipif(not HADOLINT.exists(), reason="missing tool: hadolint, of the extra `test` on x86_64")
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    done = _run(HADOLINT, "--format", "tty", "--no-color", dockerfile)

    assert (done.returncode, done.stdout) == (0, "")


@names
def test_an_image_runs_as_uid_1000_with_an_entry_in_passwd(dockerfile: Path) -> None:
    commands = " && ".join(_instructions(dockerfile, "RUN"))

    assert _instructions(dockerfile, "USER") == ["0", "1000"]
    assert "deploy/docker/make_user.sh" in commands
    assert "install -d -o 1000 -g 1000 /home/ma-user" in commands


@names
def test_native_libraries_are_built_by_and_for_the_images_user(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    environment = " ".join(_instructions(dockerfile, "ENV"))

    assert _instructions(dockerfile, "RUN")[-1].endswith(" && python -P -m native.build")
    assert text.index("USER 1000") < text.index("native.build") < text.index("ENTRYPOINT")
    assert library_folder(dict(word.split("=", 1) for word in environment.split())) == Path(
        "/home/ma-user/.cache/pdserve/native"
    )


@pytest.mark.long
def test_a_start_in_the_image_compiles_nothing(tmp_path: Path) -> None:
    """Run by hand as the image's build runs it, in its own home: the compilers of this machine."""
    (command,) = re.findall(r"(python -P -m native\.build)$", _instructions(DOCKERFILES[0], "RUN")[-1])
    environ = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-eu", "-c", command], capture_output=True, text=True, timeout=300, env=environ, cwd=CLONE, check=False
    )

    assert done.returncode == 0, done.stderr
    found = {name: find_library(recipe, environ) for name, recipe in RECIPES.items()}
    assert {name: one.reason for name, one in found.items() if one.library is None} == {}


@names
def test_every_file_that_an_image_runs_exists_and_is_executable(dockerfile: Path) -> None:
    named = re.findall(r"(?:/opt/pdserve/)?(deploy/[\w./-]+)", "\n".join(_instructions(dockerfile, "RUN")))
    (entrypoint,) = _instructions(dockerfile, "ENTRYPOINT")
    named.append(json.loads(entrypoint)[0].removeprefix("/opt/pdserve/"))

    assert len(named) >= 5
    for name in named:
        assert (CLONE / name).is_file(), name
        assert os.access(CLONE / name, os.X_OK) or name.endswith("ascend_env.sh"), name


def test_ascend_keeps_torch_and_torch_npu_together() -> None:
    run = " ".join(_instructions(DOCKER / "Dockerfile.ascend", "RUN"))

    assert 'install_pdserve.sh npu "$TORCH" "$TORCH_NPU"' in run
    assert 'install_torchvision_npu.sh "$TORCHVISION_NPU_URL" "$TORCHVISION_NPU_TAG" "$TORCHVISION"' in run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_every_shell_reads_the_scripts(script: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")

    assert _run(shell, "-n", script).stderr == ""


@pytest.mark.parametrize(
    ("passwd", "group", "added"),
    [
        ("root:x:0:0:root:/root:/bin/bash\n", "root:x:0:\n", True),
        ("root:x:0:0::/root:/bin/sh\nHwHiAiUser:x:1000:1000::/home/Hw:/bin/bash\n", "HwHiAiUser:x:1000:\n", True),
        ("ma-user:x:1000:100::/home/ma-user:/bin/bash\n", "users:x:100:\n", False),
    ],
)  # fmt: skip
def test_ma_user_is_added_once_and_no_user_is_removed(tmp_path: Path, passwd: str, group: str, added: bool) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text(passwd)
    (tmp_path / "etc" / "group").write_text(group)

    first = _run(DOCKER / "make_user.sh", tmp_path)
    _run(DOCKER / "make_user.sh", tmp_path)

    assert first.returncode == 0, first.stderr
    lines = (tmp_path / "etc" / "passwd").read_text().splitlines()
    assert lines[: len(passwd.splitlines())] == passwd.splitlines()
    assert [line.split(":")[2] for line in lines if line.startswith("ma-user:")] == ["1000"]
    assert len(lines) == len(passwd.splitlines()) + added
    groups = [line.split(":")[2] for line in (tmp_path / "etc" / "group").read_text().splitlines()]
    assert groups.count("1000") == (1 if added else 0)


def test_a_ma_user_with_another_uid_is_refused(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("ma-user:x:1001:1001::/home/ma-user:/bin/bash\n")
    (tmp_path / "etc" / "group").write_text("")

    done = _run(DOCKER / "make_user.sh", tmp_path)

    assert done.returncode == 1
    assert "ma-user has uid 1001" in done.stderr


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The files of an image at another place than /opt/pdserve; its programs print what they were started with."""
    shutil.copytree(CLONE / "deploy", tmp_path / "image" / "deploy")
    for name in ("python", "pdserve"):
        path = tmp_path / "image" / ".venv" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\ncase "$2" in -c) exit 0 ;; esac\necho {name} "$@"\n')
        path.chmod(0o700)
    return tmp_path / "image"


@pytest.mark.covers("A2.41")
@pytest.mark.parametrize(
    ("words", "table", "started"),
    [
        (["--model=m", "--port", "8088"], True, "python -P -m pdserve.launch --model=m --port 8088"),
        (["--model=m", "--port", "8088"], False, "pdserve serve --model=m --port 8088"),
        (["echo", "a  b"], True, "a  b"),
    ],
)
def test_the_entrypoint_forwards_its_arguments(image: Path, words: list[str], table: bool, started: str) -> None:
    environ = {"GLOBAL_RANK_TABLE_FILE_PATH": "/work/global.json"} if table else {}

    done = _run(image / "deploy" / "docker" / "entrypoint.sh", *words, **environ)

    assert (done.stdout, done.stderr) == (f"{started}\n", "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_cann_is_sourced_under_a_strict_shell_too(tmp_path: Path) -> None:
    """CANN's own scripts are bash's, read variables that are not set, and run commands that fail."""
    text = (DOCKER / "ascend_env.sh").read_text().replace("/usr/local/Ascend", str(tmp_path))
    (tmp_path / "env.sh").write_text(text)
    (tmp_path / "ascend-toolkit").mkdir()
    (tmp_path / "ascend-toolkit" / "set_env.sh").write_text(
        "false\nexport FOUND=cann${BASH_SOURCE[1]:0:0}$NO_SUCH_VARIABLE\n"
    )

    done = _run("bash", "-euc", f'. {tmp_path}/env.sh; echo "$FOUND $LD_LIBRARY_PATH"; echo $NO_SUCH')

    assert done.stdout.startswith(f"cann {tmp_path}/driver/lib64/driver:")
    assert done.returncode != 0  # it is strict again


def test_tools_are_installed_only_where_they_are_missing(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("apt-get", "rm"):
        (bare / name).write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
        (bare / name).chmod(0o700)
    (bare / "basename").symlink_to(shutil.which("basename") or "")

    missing = _run("/bin/sh", DOCKER / "install_tools.sh", "vision", PATH=str(bare))
    (bare / "gcc").symlink_to("/bin/true")
    there = _run("/bin/sh", DOCKER / "install_tools.sh", PATH=str(bare))

    assert missing.stdout.splitlines()[1] == (
        "apt-get install -y --no-install-recommends gcc g++ git libc6-dev ca-certificates"
    )
    assert there.stdout == ""


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker client on this machine")
def test_the_context_has_what_an_image_needs_and_no_secret(tmp_path: Path) -> None:
    """Docker's own client reads .dockerignore and sends the context to a stand-in for its engine."""
    environ = {"DOCKER_HOST": f"unix://{tmp_path}/engine", "HOME": str(tmp_path), "DOCKER_BUILDKIT": "0"}
    build = ["docker", "build", "--file", DOCKER / "Dockerfile.cpu", "--build-arg=TORCH=2.13.0", "--tag=t", CLONE]

    with fake_engine(tmp_path / "engine") as engine:
        done = _run(*build, **environ)

    assert done.returncode == 0, done.stderr
    with tarfile.open(fileobj=io.BytesIO(engine.contexts[0])) as context:
        members = context.getnames()
    packages = tomllib.loads((CLONE / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert [name for name in packages if f"{name.replace('.', '/')}/__init__.py" not in members] == []
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "scripts/install"} <= set(members)
    assert {"native/attention.c", "deploy/PD_separate/start_servers.sh"} <= set(members)
    unwanted = re.compile(r"(^|/)(\.git|\.venv|__pycache__|cluster_secret|tests|docs|ranktables)(/|$)")
    assert [name for name in members if unwanted.search(name)] == []
