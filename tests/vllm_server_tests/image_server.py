"""The images of vLLM's tests, which are not part of its sdist: others of the same names and formats, over HTTP."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from PIL import Image

from tests.images.image_files import file_of, image_of


class ImageServer:
    """Owner of the server; what vLLM's tests call on theirs."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()

    def url_for(self, name: str) -> str:
        """Return the URL of an image."""
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def get_image_asset(self, name: str) -> Image.Image:
        """Return the image itself."""
        return _image(name)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = file_of(_image(self.path), "JPEG" if self.path.endswith(".jpg") else "PNG")
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *values: object) -> None:
        pass


def _image(name: str) -> Image.Image:
    mode = "L" if "Grayscale" in name else "RGBA" if "RGBA" in name else "RGB"
    return image_of(640, 480, seed=len(name), mode=mode)
