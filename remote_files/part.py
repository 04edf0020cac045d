"""The part of a file received so far, and the headers that request the rest of the same file.

The rest is requested if the server identifies the file by a strong ETag: `Range` with `If-Range`, which a server
answers with 206 and the rest, or with 200 and the whole file if it has changed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from remote_files.digests import Digests

_STRONG = re.compile(r'"[\x21\x23-\x7e\x80-\xff]*"')
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(slots=True)
class FilePart:
    """The first `num_bytes` bytes of a file of `length` bytes, None if that is unknown. Owned by one download."""

    etag: str | None
    length: int | None
    digests: Digests
    num_bytes: int = 0

    @classmethod
    def begun(cls, headers: Mapping[str, str], length: int | None) -> "FilePart":
        """Return the empty start of the file in an answer with these headers."""
        etag = headers.get("ETag", "")
        return cls(etag if _STRONG.fullmatch(etag) else None, length, Digests(headers))

    @property
    def headers(self) -> dict[str, str]:
        """The headers that request the rest; empty if the whole file is needed again."""
        if self.etag is None or not self.num_bytes or self.num_bytes == self.length:
            return {}
        return {"Range": f"bytes={self.num_bytes}-", "If-Range": self.etag}

    def is_continued(self, headers: Mapping[str, str]) -> bool:
        """Return whether a 206 with these headers has the rest, up to the file's end."""
        found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if found is None or found[3] == "*" or headers.get("ETag", self.etag) != self.etag:
            return False
        begin, last, length = int(found[1]), int(found[2]), int(found[3])
        return begin == self.num_bytes and last == length - 1 and self.length in (None, length)
