"""Every input that docker_run.sh, build_image.sh and link_guide_paths refuse before calling docker, as data."""

from collections.abc import Mapping

from pdserve import container_command
from ranktable_tools.containers import guide_paths
from tests.docs.broken_input import Broken, Command
from tests.ranktable_tools.broken_inputs import with_value
from tests.ranktable_tools.documents import A, Document, local, modelarts, server

_DOCKER = Command(lambda words: container_command.main(["docker_run", *words]), "docker_run.sh: ")
_IMAGE = Command(lambda words: container_command.main(["build_image", *words]), "build_image.sh: ")
_PATHS = Command(guide_paths.main, "link_guide_paths: ")
_TABLES: Mapping[str, Document] = {"g.json": modelarts(), "l.json": local()}
_GIVEN = ("--image", "pdserve", "--dir", "/data", "--device-type", "npu")
_LOCAL = (*_GIVEN, "--local-table", "l.json")
_GLOBAL = (*_GIVEN, "--global-table", "g.json")


def _row(what: str, *words: str, files: Mapping[str, Document] = _TABLES) -> Broken:
    return Broken(what, None, files, words, _DOCKER)


DOCKER_RUN = (
    _row("no role", *_LOCAL),
    _row("no image", "decode", "--dir", "/data", "--local-table", "l.json"),
    _row("a variable that is not set for a value", "decode", *_GIVEN, "--local-table", ""),
    _row("no table", "decode", *_GIVEN),
    _row("a local table that does not exist", "decode", *_GIVEN, "--local-table", "gone.json"),
    _row("another role than the local table's", "prefill", *_LOCAL, "--global-table", "g.json"),
    _row("the scheduler with an instance's local table", "scheduler", *_LOCAL),
    _row("an instance with the scheduler's local table", "decode", *_LOCAL, files={"l.json": local(server(A))}),
    _row(
        "a local table that is not in the global one",
        "decode", *_LOCAL, "--global-table", "g.json",
        files={"g.json": modelarts(), "l.json": with_value(local(), "server_list.0.device.0.device_ip", A)},
    ),
    _row(
        "several instances that fit",
        "prefill", *_GLOBAL,
        files={"g.json": modelarts(prefill=[server(A, 4), server(A, 5)], decode=[server(A, 6)])},
    ),
    _row("an instance that is not in the table", "decode", *_GLOBAL, "--instance", "2"),
    _row("a mount over the home of the image's user", "decode", *_LOCAL, "--container-work-dir", "/home/ma-user"),
    _row("a mount over it by another path", "decode", *_LOCAL, "--volume", "/data:/work/../home/ma-user/work"),
    _row("a folder that is not an absolute path", "decode", *_LOCAL, "--volume", "data:/work"),
    _row("a volume without its place", "decode", *_LOCAL, "--volume", "/data"),
    _row("a name that docker does not take", "decode", *_LOCAL, "--name", "a b"),
    _row("a size that is not a number", "decode", *_LOCAL, "--shm-size", "much"),
    _row("a typo in a flag", "decode", *_LOCAL, "--shm=2g"),
    Broken(
        "a typo in a key of --config", None, {"c.yaml": "image: pdserve\nshm-sise: 2g\n"},
        ("decode", "--config=c.yaml"), _DOCKER,
    ),
    _row("an image that is a flag", "decode", "--image=--privileged", "--dir", "/data", "--local-table", "l.json"),
)  # fmt: skip

OTHERS = (
    Broken("build_image.sh: no base image", None, {}, ("--image-name=pdserve",), _IMAGE),
    Broken("build_image.sh: an invalid image name", None, {}, ("--base-image=a", "--image-name=Pd serve"), _IMAGE),
    Broken("build_image.sh: a typo in a flag", None, {}, ("--base-imag=a", "--image-name=b"), _IMAGE),
    Broken(
        "build_image.sh: a typo in a key of --config", None, {"c.yaml": "base_imag: a\n"}, ("--config=c.yaml",), _IMAGE
    ),
    Broken("link_guide_paths: no folder", None, {}, (), _PATHS),
    Broken("link_guide_paths: a path that is taken", None, {"AscendCloud-LLM": "a file\n"}, (".",), _PATHS),
)

SECTIONS: Mapping[str, tuple[Broken, ...]] = {
    "`deploy/docker_run.sh`": DOCKER_RUN,
    "`deploy/build_image.sh`, `deploy/link_guide_paths`": OTHERS,
}
