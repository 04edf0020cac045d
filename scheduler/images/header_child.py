"""The process that reads the headers of image files, with limits on files, memory and CPU time.

Each frame on its socket is a file; the answer is {"format", "width", "height"} or {"error"}.
"""

import contextlib
import resource
import socket
import sys

from PIL import Image

from images.image_file import MAX_PIXELS, read_header
from processes.child_limits import cpu_limit, end_with
from processes.frames import read_frame, send_object
from wire.errors import InvalidRequest
from wire.prompt_images import MAX_IMAGE_BYTES

_MEMORY_BYTES = 128 * 2**20 + 8 * MAX_PIXELS
"""Memory for a header, in addition to the process and three copies of the largest file: Pillow's WebP reader allocates
the whole canvas twice."""
_COPIES = 3


def main(connection: socket.socket, seconds: float) -> None:
    """Answer until the connection ends; `seconds` is the CPU time for each header."""
    Image.init()  # loads the modules of all formats: opening files is impossible later
    _give_up_the_rest(connection.fileno())
    source = connection.makefile("rb")
    while (data := read_frame(source.read, MAX_IMAGE_BYTES)) is not None:
        with cpu_limit(seconds):
            try:
                header = read_header(data)
                answer = {"format": header.format, "width": header.width, "height": header.height}
            except InvalidRequest as error:
                answer = {"error": str(error)}
            except Exception as error:  # noqa: BLE001 - Pillow's readers raise errors of many kinds
                answer = {"error": f"the image's header is broken: {type(error).__name__}"}
        send_object(connection, answer)


def _give_up_the_rest(kept: int) -> None:
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    address_bytes = pages * resource.getpagesize() + _MEMORY_BYTES + _COPIES * MAX_IMAGE_BYTES
    for limit, value in (
        (resource.RLIMIT_AS, address_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, kept + 1),
    ):
        resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    with contextlib.suppress(ConnectionError):  # the scheduler has exited
        main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[3]))
