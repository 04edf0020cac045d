"""The encoding process, `python -P -m engine.vision.child FD PARENT_PID`: its crash does not end the instance.

    parent: {"folder", "dtype", "device", "num_threads", "memory_bytes"}
    child:  {"ready", "bytes"} | {"refused": message}
    parent: an image file
    child:  {"count", "grid"}, then the values | {"refused": message} | {"failed": message}
    ... until EOF

The parent kills it after a timeout, and the kernel kills it when the parent's thread ends. On a CPU, allocations beyond
the memory limit fail.
"""

import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.torch_start import prepare_torch
from engine.vision.encoded_image import MIB, EncodedImage
from processes.child_limits import end_with
from processes.frames import frame, receive_frame, receive_object, send_object
from wire.errors import ConfigError, InvalidRequest
from wire.prompt_images import MAX_IMAGE_BYTES

if TYPE_CHECKING:
    from engine.vision.tower import VisionTower

_NO_MEMORY = "allocate memory"  # in the message of torch's RuntimeError
_HELLO_BYTES = 64 * 1024
_NICENESS = 5  # below the engine, whose steps other requests wait for


def main(descriptor: int) -> None:
    """Serve the connection on `descriptor` until the parent closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles a terminal's Ctrl-C
    with socket.socket(fileno=descriptor) as connection:
        hello = receive_object(connection, _HELLO_BYTES)
        if hello is None:
            return
        try:
            tower = _load(hello)
        except (ConfigError, OSError, ValueError) as error:
            send_object(connection, {"refused": str(error)})
            return
        send_object(connection, {"ready": True, "bytes": tower.num_bytes})
        while (data := receive_frame(connection, MAX_IMAGE_BYTES)) is not None:
            _answer(connection, tower, data, hello["memory_bytes"])


def _load(hello: dict[str, Any]) -> "VisionTower":
    prepare_torch(hello["num_threads"])
    import torch
    from transformers.utils import logging as transformers_logging

    from devices.table import open_device
    from engine.vision.tower import VisionTower

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(hello["num_threads"])
    device = open_device(hello["device"])
    device.activate()
    tower = VisionTower(Path(hello["folder"]), hello["dtype"], device.name)
    if device.name == "cpu":  # on other devices, the address space does not show the memory in use
        os.nice(_NICENESS)
        maximum = _vm_bytes() + hello["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (maximum, maximum))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return tower


def _answer(connection: socket.socket, tower: "VisionTower", data: bytes, memory_bytes: int) -> None:
    try:
        encoded: EncodedImage | None = tower.encode(data)
        answer: dict[str, Any] = {}
    except InvalidRequest as error:
        encoded, answer = None, {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - the outermost frame of an image: it is answered, and the next is served
        encoded, answer = None, {"failed": f"{type(error).__name__}: {error}"}
        if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
            answer = {"refused": f"encoding the image takes more memory than the limit of {memory_bytes // MIB} MiB"}
    if encoded is None:
        send_object(connection, answer)
    else:
        send_object(connection, {"count": encoded.tokens.count, "grid": encoded.tokens.grid})
        connection.sendall(frame(encoded.values))


def _vm_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    main(int(sys.argv[1]))
