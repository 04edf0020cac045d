"""Import the modules of an instance in a spare process that waits to become one. Opens no device and no port."""

import contextlib
import importlib
import os
import time
from pathlib import Path

from engine.torch_start import prepare_torch
from flags.options import EngineOptions
from instance.encoders import may_be_encoder
from native.builder import find_library
from native.libraries import RECIPES
from wire.errors import PdserveError

_BUILD_S = 900.0
_POLL_S = 1.0
_LIBRARIES = ("engine", "move")
_ALWAYS = ("instance.process", "instance.http")
_ENCODERS = ("engine.pooling.core", "engine.pooling.encoder")
_DECODERS = ("engine.loader", "engine.headroom", "engine.core", "engine.grammar.store", "engine.grammar.tokenizer_file")


def import_all(options: EngineOptions) -> None:
    """Import the modules of this engine and model, and open its native libraries. Raises ImportError.

    A model that cannot be read is not an error here: the instance will report it.
    """
    for name in _ALWAYS:
        importlib.import_module(name)
    if options.engine == "fake":
        from instance.build import FAKE_ENGINE

        importlib.import_module(FAKE_ENGINE)
        return
    prepare_torch(2)  # the settings for several threads have no effect on a single one
    _wait_for_libraries()
    with contextlib.suppress(PdserveError):
        if may_be_encoder(options.model):
            for name in _ENCODERS:
                importlib.import_module(name)
    for name in _DECODERS:
        importlib.import_module(name)
    with contextlib.suppress(PdserveError):
        _import_model(options)


def _import_model(options: EngineOptions) -> None:
    """Import the model's classes by building its network with shapes only."""
    from engine.kv_probe import rehearse
    from engine.model_folder import open_folder

    rehearse(open_folder(Path(options.model), options.quantization).checkpoint, "float32")


def _wait_for_libraries() -> None:
    """Wait until the native libraries are built, where they can be, so that no replacement has to build one."""
    deadline = time.monotonic() + _BUILD_S
    for name in _LIBRARIES:
        while (found := find_library(RECIPES[name], os.environ)).is_awaited and time.monotonic() < deadline:
            if found.build is None:
                time.sleep(_POLL_S)  # another process builds it
            else:
                found.build.wait(deadline - time.monotonic())
