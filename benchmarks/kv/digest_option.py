"""Whether KvSender and KvReceiver of this checkout can be told to leave digests out."""

import inspect
from typing import Any

from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender


def digest_is_optional() -> bool:
    """Tell whether both halves take `digest`."""
    return all("digest" in inspect.signature(half.__init__).parameters for half in (KvSender, KvReceiver))


def with_digest(half: Any, digest: bool) -> dict[str, Any]:
    """Return the keyword that sets the digest; nothing where it is on anyway and cannot be set."""
    if "digest" in inspect.signature(half.__init__).parameters:
        return {"digest": digest}
    if not digest:
        raise ValueError(f"{half.__name__} has no option `digest`")
    return {}
