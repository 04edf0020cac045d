"""Out-of-memory errors are recognised by their own message or by that of their cause or context."""

import pytest
import torch

from devices.out_of_memory import is_out_of_memory


def raised_during(first: Exception, second: Exception) -> Exception:
    """Return the second error as raised while the first was handled."""
    try:
        try:
            raise first
        except Exception:
            raise second  # noqa: B904 - as a capture's end does
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB"), True),
        (raised_during(torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("capture failed")), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (raised_during(ValueError("no"), RuntimeError("operation not permitted when stream is capturing")), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_recognised_along_the_chain(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it
