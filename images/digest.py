"""The digest of an image: two are equal only if the embeddings and the tenants are. Pure."""

import hashlib


def image_digest(data: bytes, *, settings_digest: bytes, model: str, cache_salt: str) -> bytes:
    """Return the sha256 over an image file, the processor's settings, the model's name and the tenant.

    For embeddings, their values take the place of the file, and their type and grid that of the settings.

    Each part is hashed on its own first, so no two different sets of parts are the same bytes.
    """
    parts = (data, settings_digest, model.encode(), cache_salt.encode())
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
