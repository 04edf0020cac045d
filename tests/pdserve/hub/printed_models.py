"""The models that the guides name, tiny and random, under their names at a hub on loopback."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.engine.bin_models import make_bin_model
from tests.engine.tiny_models import make_tiny_model
from tests.native.built import copy_libraries
from tests.pdserve.hub.fake_hub import FakeHub

OPT = "facebook/opt-125m"
LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"
NOUS_LLAMA = "NousResearch/Meta-Llama-3.1-8B-Instruct"
QWEN = "Qwen/Qwen2-7B-Instruct"
_KINDS = {OPT: "opt", LLAMA: "llama", NOUS_LLAMA: "llama3", QWEN: "qwen2"}


@contextmanager
def printed_models(folder: Path, names: Sequence[str] = tuple(_KINDS)) -> Iterator[FakeHub]:
    """Serve them from folders under `folder`; OPT has only .bin weights, as at the hub."""
    for name in names:
        if name == OPT:
            make_bin_model(folder / name)
        else:
            make_tiny_model(_KINDS[name], folder / name)
    with FakeHub({name: folder / name for name in names}) as hub:
        yield hub


def hub_environment(hub: FakeHub, folder: Path) -> dict[str, str]:
    """Return the environment of a user of that hub who has no models yet, but the native libraries."""
    copy_libraries(folder / "cache")
    return {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "huggingface"), "PDSERVE_CACHE_DIR": str(folder / "cache"),
        "HF_TOKEN": hub.token,
    }  # fmt: skip


def put_code(folder: Path, marker: Path) -> None:
    """Put code that writes `marker` into a model folder, and let config.json refer to it everywhere."""
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Evil: ...\n"
    (folder / "modeling_evil.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "modeling_evil.Evil")
    (folder / "config.json").write_text(json.dumps(config))
