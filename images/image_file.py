"""Image files by Pillow: an allow list of formats and a limit on pixels, checked before anything is decoded.

Only child processes with limits call this: the files come from users.
"""

import io
import warnings

from PIL import Image, ImageOps

from images.image_header import ImageHeader
from wire.errors import InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 64 * 2**20
"""The limit for one image; a decoded image has three bytes per pixel."""
_ORIENTATION = 0x0112  # the EXIF tag; 5 to 8 swap width and height


def read_header(data: bytes) -> ImageHeader:
    """Return the format and size of an image without decoding it. Raises InvalidRequest."""
    with _open(data) as image:
        width, height = image.size
        exif = Image.Image.getexif(image)  # PNG's own getexif decodes the pixels, in search of EXIF data after them
        if exif.get(_ORIENTATION, 1) in (5, 6, 7, 8):
            width, height = height, width
        return ImageHeader(image.format or "", width, height)


def decode(data: bytes) -> Image.Image:
    """Return the first frame of an image, oriented, in RGB. Raises InvalidRequest."""
    with _open(data) as image:
        try:
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise errors of many kinds on broken files
            raise InvalidRequest(f"the image file is broken: {error}") from error


def _open(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about many pixels: our own limit is below
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"the image has too many pixels: the limit is {MAX_PIXELS} pixels") from error
    except Exception as error:  # Pillow raises errors of many kinds here too
        raise InvalidRequest(f"not an image in a supported format ({', '.join(FORMATS)}): {error}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InvalidRequest(f"the image has {width} x {height} pixels, but the limit is {MAX_PIXELS} pixels")
    return image
