"""The flashinfer module, if it is installed and can be imported; a kernel may be compiled at its first call."""

import importlib
import importlib.util
from typing import Any

from devices.versions import package_version

NAME = "flashinfer"


def find_flashinfer() -> tuple[Any, str]:
    """Return the module and its name with its version, or None and the reason."""
    if importlib.util.find_spec(NAME) is None:
        return None, f"{NAME} is not installed"
    try:
        module = importlib.import_module(NAME)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"{NAME} cannot be used: {error}"
    version = package_version("flashinfer-python") or getattr(module, "__version__", "of unknown version")
    return module, f"{NAME} {version}"
