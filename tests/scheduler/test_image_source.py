"""The base64 of images: decoded as binascii does in its strict mode."""

import base64
import binascii
import contextlib

from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.images.image_source import decode_base64
from tests.examples import examples

_TEXTS = st.text(alphabet='ABCDwxyz0189+/=-_\\"\n é\ud800', max_size=12)


@examples(300)
@given(st.one_of(_TEXTS, st.binary(max_size=40).map(lambda data: base64.b64encode(data).decode())))
@example("AA==AAAA")
@example("AB==")  # with bits after its last byte
@example("AA-_")
@example("AAA")
@example("\\u0041AA")
def test_base64_is_that_of_binascii(text: str) -> None:
    expected = found = None
    with contextlib.suppress(ValueError):
        expected = binascii.a2b_base64(text.encode(), strict_mode=True)
    with contextlib.suppress(ValueError):
        found = decode_base64(text)

    assert found == expected
