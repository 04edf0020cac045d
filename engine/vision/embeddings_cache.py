"""Embeddings by digest: the least recently used are evicted, bounded by bytes. Pure; the owner locks it."""

from collections import OrderedDict

from engine.vision.encoded_image import EncodedImage

_ENTRY_BYTES = 512
"""What an entry costs besides its values."""


class EmbeddingsCache:
    """Encoded images by digest. Mutable, owned by the encoder."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._entries)

    def find(self, digest: bytes) -> EncodedImage | None:
        """Return an image's embeddings and mark them as most recently used."""
        found = self._entries.get(digest)
        if found is not None:
            self._entries.move_to_end(digest)
        return found

    def keep(self, digest: bytes, encoded: EncodedImage) -> None:
        """Keep an image that fits the limit at all; evict the least recently used until all fit."""
        if digest in self._entries or _cost(encoded) > self._limit_bytes:
            return
        self._entries[digest] = encoded
        self.num_bytes += _cost(encoded)
        while self.num_bytes > self._limit_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.num_bytes -= _cost(evicted)


def _cost(encoded: EncodedImage) -> int:
    return len(encoded.values) + _ENTRY_BYTES
