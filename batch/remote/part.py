"""What has come of a file so far, and how the rest of that very file is asked for.

It is asked for where the server names the file by a strong ETag: `Range` with `If-Range`, which a server answers by
206 and the rest, or by 200 and the whole where the file is another one by now.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from batch.remote.digests import Digests

_STRONG = re.compile(r'"[\x21\x23-\x7e\x80-\xff]*"')
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(slots=True)
class FilePart:
    """The first `num_bytes` bytes of a file of `length` bytes, None where that is not told. Owned by one download."""

    etag: str | None
    length: int | None
    digests: Digests
    num_bytes: int = 0

    @classmethod
    def begun(cls, headers: Mapping[str, str], length: int | None) -> "FilePart":
        """Return the beginning of the file that an answer with these headers brings."""
        etag = headers.get("ETag", "")
        return cls(etag if _STRONG.fullmatch(etag) else None, length, Digests(headers))

    @property
    def headers(self) -> dict[str, str]:
        """What asks for the rest; nothing where the whole has to come again."""
        if self.etag is None or not self.num_bytes or self.num_bytes == self.length:
            return {}
        return {"Range": f"bytes={self.num_bytes}-", "If-Range": self.etag}

    def is_continued(self, headers: Mapping[str, str]) -> bool:
        """Whether a 206 with these headers brings the rest, to the file's end."""
        told = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if told is None or told[3] == "*" or headers.get("ETag", self.etag) != self.etag:
            return False
        begin, last, length = int(told[1]), int(told[2]), int(told[3])
        return begin == self.num_bytes and last == length - 1 and self.length in (None, length)
