"""deploy/build_image.sh: how it probes the base image, what it refuses before the build, what docker builds."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ranktable_tools.containers import build_image
from ranktable_tools.containers.base_image import PROBE, parse_probe, parse_version
from ranktable_tools.containers.vision import choose_tag, vision_of
from tests.deploy.stub_docker import StubDocker

CLONE = Path(__file__).resolve().parent.parent.parent
FLAGS = ["--base-image=cann:9.1", "--image-name=pdserve"]
CANN = "image=asked\ncann=/usr/local/Ascend/ascend-toolkit\npython=3.12\n"
TAGS = ("v0.12.0", "v0.16.0-6.0.rc3", "v0.25.0-26.0.rc1", "v0.25.0-26.0.rc2", "v0.25.0-26.0.0", "v0.25.0-25.9.9", "old",
        "v0.28.0-26.1.0")  # fmt: skip
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubDocker:
    """A docker whose base image has CANN and no torch, and a git that knows TAGS."""
    stub = StubDocker(tmp_path / "bin")
    stub.answers_run(CANN, 0)
    refs = "\n".join(f"{index:040x}\trefs/tags/{tag}" for index, tag in enumerate(TAGS))
    git = stub.folder / "git"
    git.write_text(f'#!/bin/sh\necho "$@" >> "{stub.folder}/git-calls"\ncat <<"END"\n{refs}\nEND\n')
    git.chmod(0o700)
    monkeypatch.setenv("PATH", f"{stub.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "execv", _not_here)
    for name in build_image._PASSED_ON:
        monkeypatch.delenv(name, raising=False)
    return stub


def _not_here(path: str, words: list[str]) -> None:
    """Fail instead of replacing the test process."""
    raise AssertionError(f"would have become {words}")


def _line(capsys: Capture, *words: str) -> list[str]:
    status = build_image.main([*FLAGS, "--print", *words])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return shlex.split(captured.out)


def _refusal(capsys: Capture, docker: StubDocker, *words: str) -> str:
    status = build_image.main([*FLAGS, *words])
    captured = capsys.readouterr()
    assert (status, captured.out, docker.calls_of("build")) == (2, "", [])
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.covers("A8.119")
def test_the_guides_line_probes_the_base_image_and_builds(docker: StubDocker, tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(CLONE / "deploy" / "build_image.sh"), *FLAGS], capture_output=True, text=True, timeout=300,
        cwd=tmp_path, env={"PATH": os.environ["PATH"], "PDSERVE_PYTHON": sys.executable}, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert docker.calls_of("run")[0][:7] == ["run", "--rm", "--network=none", "--entrypoint", "sh", "cann:9.1", "-c"]
    assert docker.calls_of("build") == [
        [
            "build", f"--file={CLONE}/deploy/docker/Dockerfile.ascend", "--build-arg=BASE_IMAGE=cann:9.1",
            "--build-arg=TORCH=2.13.0", "--build-arg=TORCH_NPU=2.13.0", "--tag=pdserve", str(CLONE),
        ]
    ]  # fmt: skip
    assert (CLONE / "deploy" / "docker" / "Dockerfile.ascend").is_file()


def test_the_pinned_torch_is_that_of_the_constraints() -> None:
    assert f"torch=={build_image.pinned_version(CLONE, 'torch')}\n" in (CLONE / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("reported", "kind", "values"),
    [
        ("image=asked\npython=3.12\n", "cpu", {"TORCH": "2.13.0"}),
        ("image=asked\npython=3.11\ntorch=2.12.1+cu130\n", "cuda", {"TORCH": "2.12.1"}),
        ("image=asked\npython=3.11\ntorch=2.10.0+cpu\n", "cpu", {"TORCH": "2.10.0"}),
        (f"{CANN}torch=2.10.0+cpu\n", "ascend", {"TORCH": "2.10.0", "TORCH_NPU": "2.10.0"}),
        (f"{CANN}torch=2.10.0\ntorch_npu=2.10.0.post1\n", "ascend", {"TORCH": "2.10.0", "TORCH_NPU": "2.10.0.post1"}),
        (f"{CANN}torch_npu=2.12.0\n", "ascend", {"TORCH": "2.12.0", "TORCH_NPU": "2.12.0"}),
    ],
)
def test_the_image_follows_the_base_images_torch(
    docker: StubDocker, capsys: Capture, reported: str, kind: str, values: dict[str, str]
) -> None:
    docker.answers_run(reported, 0)

    line = _line(capsys)

    assert line[2].endswith(f"/Dockerfile.{kind}")
    given = dict(word.removeprefix("--build-arg=").split("=", 1) for word in line if word.startswith("--build-arg="))
    assert given == {"BASE_IMAGE": "cann:9.1", **values}
    assert docker.calls_of("build") == []


@pytest.mark.parametrize("docker_is", ["not installed", "not running"])
@pytest.mark.parametrize(
    ("image", "words", "kind"),
    [
        ("ascend/cann:9.1", (), "ascend"),
        ("python:3.12", (), "cpu"),
        ("python:3.12", ("--device=cuda",), "cuda"),
        ("mine:1", ("--device=ascend",), "ascend"),
    ],
)
def test_print_needs_no_docker(
    docker: StubDocker, capsys: Capture, image: str, words: tuple[str, ...], kind: str, docker_is: str
) -> None:
    if docker_is == "not installed":
        (docker.folder / "docker").unlink()
    else:
        docker.answers_run("Cannot connect to the Docker daemon", 1)

    status = build_image.main([f"--base-image={image}", "--image-name=pdserve", "--print", *words])

    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert shlex.split(captured.out)[2].endswith(f"/Dockerfile.{kind}")
    held = "CANN" if kind == "ascend" else "no CANN"
    assert f"{image} is assumed to have Python 3.11, {held} and no torch" in captured.err


@pytest.mark.covers("A10.146")
@pytest.mark.parametrize(
    ("torch", "tag", "vision"),
    [("2.10.0+cpu", "v0.25.0-26.0.0", "0.25"), ("2.13.0", "v0.28.0-26.1.0", "0.28"), ("", "v0.28.0-26.1.0", "0.28")],
)
def test_torchvision_npu_follows_the_images_torch(
    docker: StubDocker, capsys: Capture, torch: str, tag: str, vision: str
) -> None:
    docker.answers_run(f"{CANN}torch={torch}\n" if torch else CANN, 0)

    line = _line(capsys, "--with-torchvision-npu")

    assert f"--build-arg=TORCHVISION_NPU_TAG={tag}" in line
    assert f"--build-arg=TORCHVISION={vision}" in line
    assert "--build-arg=TORCHVISION_NPU_URL=https://gitee.com/ascend/vision.git" in line
    assert (docker.folder / "git-calls").read_text() == (
        "ls-remote --tags --refs https://gitee.com/ascend/vision.git\n"
    )


def test_a_given_tag_is_used_without_listing_others(docker: StubDocker, capsys: Capture) -> None:
    line = _line(capsys, "--with-torchvision-npu=v0.28.1-7.0", "--torchvision-npu-url=/srv/vision.git")

    assert "--build-arg=TORCHVISION_NPU_TAG=v0.28.1-7.0" in line
    assert "--build-arg=TORCHVISION_NPU_URL=/srv/vision.git" in line
    assert not (docker.folder / "git-calls").exists()


@pytest.mark.parametrize(
    ("reported", "flags", "message"),
    [
        (CANN, ["--with-torchvision-npu=v0.16.0-6.0.rc3"], "is for torch 2.1, but the image's torch is 2.13.0: use a"),
        (CANN, ["--with-torchvision-npu=main"], "--with-torchvision-npu=main: write a tag"),
        (f"{CANN}torch=2.11.0\n", ["--with-torchvision-npu"], "no torchvision_npu v0.26.* for the image's torch "
         "2.11.0; the newest are v0.12.0, v0.16.0-6.0.rc3, v0.25.0-25.9.9"),
        (f"{CANN}torchvision_npu=0.28.0\n", ["--with-torchvision-npu"], "already has torchvision_npu 0.28.0: omit"),
        ("image=asked\npython=3.12\n", ["--with-torchvision-npu"], "is for Ascend, but the image is for cpu"),
        (f"{CANN}torch=2.1.0\n", [], "cann:9.1 has torch 2.1.0, but pdserve needs 2.10 or newer"),
        (f"{CANN}torch=2.9.1\ntorch_npu=2.9.1\n", [], "has torch 2.9.1, but pdserve needs 2.10"),
        (f"{CANN}torch=2.13.0\ntorch_npu=2.12.0\n", [], "torch 2.13.0 and torch_npu 2.12.0, which needs torch 2.12.0"),
        (f"{CANN}torch=2.13.0+cu130\n", [], "has torch 2.13.0+cu130, which is not a build for ascend"),
        (f"{CANN}torch=2.13.0\ntorchvision=0.25.0\n", [], "torch 2.13.0 needs torchvision 0.28"),
        (f"{CANN}torch=2.13.0\ntorchvision_npu=0.16.0\n", [], "torchvision_npu 0.16.0, but torch 2.13.0 needs"),
        (f"{CANN}torch=3.0.0\n", ["--with-torchvision-npu"], "no torchvision is known for torch 3.0.0"),
        (f"{CANN}torch=2.13.0\ntorch_npu=2.13.0\n", ["--device=cpu"], "torch_npu 2.13.0, but the image is for cpu"),
        ("image=asked\npython=3.12\ntorch=2.13.0+cpu\n", ["--device=cuda"], "which is not a build for cuda"),
        ("image=asked\npython=3.12\n", ["--device=ascend"], "has no CANN in /usr/local/Ascend"),
        ("image=asked\npython=3.9\n", [], "has Python 3.9, but pdserve needs 3.11 or newer"),
        ("image=asked\n", [], "has no python3"),
        ("hello\n", [], "its shell printed no result"),
        ("image=asked\npython=3.12\ntorch=new\n", [], "'new' is not a version"),
    ],
)  # fmt: skip
def test_contradicting_flags_are_refused_before_the_build(
    docker: StubDocker, capsys: Capture, reported: str, flags: list[str], message: str
) -> None:
    docker.answers_run(reported, 0)

    assert message in _refusal(capsys, docker, *flags)


def test_an_image_that_cannot_be_run_is_one_line(docker: StubDocker, capsys: Capture) -> None:
    (docker.folder / "docker").write_text("#!/bin/sh\necho 'Unable to find image' >&2\nexit 125\n")

    assert "docker run: Unable to find image" in _refusal(capsys, docker)


def test_a_git_that_does_not_answer_is_one_line(docker: StubDocker, capsys: Capture) -> None:
    (docker.folder / "git").write_text("#!/bin/sh\necho 'fatal: Could not resolve host' >&2\nexit 128\n")

    error = _refusal(capsys, docker, "--with-torchvision-npu")

    assert "Could not resolve host; pass the tag: --with-torchvision-npu=TAG" in error


@pytest.mark.parametrize("words", [["--image-name=-x"], ["--image-name=a b"], ["--base-image="], ["--image=x"]])
def test_wrong_names_are_refused_before_docker_runs(docker: StubDocker, capsys: Capture, words: list[str]) -> None:
    assert _refusal(capsys, docker, *words)
    assert docker.calls_of("run") == []


def test_proxies_and_indexes_are_passed_on_by_name_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror/simple")

    line = _line(capsys)

    assert [word for word in line if "=" not in word.removeprefix("--build-arg=")][2:4] == [
        "--build-arg=https_proxy", "--build-arg=PIP_INDEX_URL",
    ]  # fmt: skip
    assert "secret" not in " ".join(line)


def test_the_probe_reports_this_machine() -> None:
    """The shell and Python of the tests stand in for a base image's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    done = subprocess.run(["sh", "-c", PROBE], capture_output=True, text=True, timeout=300, env={"PATH": path})

    base = parse_probe("here", done.stdout)
    assert base.python is not None
    assert base.python.minor == sys.version_info[:2]
    assert base.torch is not None
    assert base.torch.text == _metadata_version("torch")


def test_the_probe_answers_without_python(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", PROBE], capture_output=True, text=True, timeout=300, env={"PATH": str(tmp_path)}
    )

    assert parse_probe("bare", done.stdout).python is None


def test_vision_pairs_are_those_the_packages_declare() -> None:
    # torchvision 0.16.0 declares torch 2.1, 0.25.0 torch 2.10, 0.28.0 torch 2.13.
    pairs = {"2.1.0": "0.16", "2.10.0": "0.25", "2.13.0+cpu": "0.28"}

    assert {torch: vision_of(parse_version(torch)) for torch in pairs} == pairs


def test_the_newest_tag_is_not_an_older_release_candidate() -> None:
    torch = parse_version("2.10.0")

    assert choose_tag(["v0.25.1-1.0.rc1", "v0.25.0-9.0"], torch) == "v0.25.1-1.0.rc1"
    assert choose_tag(["v0.25.0-9.0.rc10", "v0.25.0-9.0.rc9"], torch) == "v0.25.0-9.0.rc10"


def _metadata_version(name: str) -> str:
    from importlib import metadata

    return metadata.version(name)


@pytest.mark.covers("A8.119")
@pytest.mark.parametrize("name", ["build_image.sh", "docker_run.sh", "link_guide_paths"])
def test_every_script_has_help(name: str) -> None:
    script = CLONE / "deploy" / name
    environ = {"PATH": os.environ["PATH"], "PDSERVE_PYTHON": sys.executable}

    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=300, env=environ, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {name} ")
