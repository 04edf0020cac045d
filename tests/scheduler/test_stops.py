"""Stop strings, compared with an oracle that has the whole text at once."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.text.stops import StopFinder

_TEXTS = st.text("ab你", max_size=12)
_STOPS = st.lists(st.text("ab你", min_size=1, max_size=4), min_size=1, max_size=3)


def _oracle(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Read one character at a time; the first complete stop wins, or the longest of those that end together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def _run(pieces: list[str], stops: list[str], *, include: bool) -> tuple[list[str], str | None]:
    finder = StopFinder(stops, include=include)
    out = []
    for piece in pieces:
        text, stop = finder.push(piece)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, finder.flush()], None


@given(pieces=st.lists(_TEXTS, max_size=6), stops=_STOPS, include=st.booleans())
def test_the_answer_is_the_same_however_the_text_is_split(pieces: list[str], stops: list[str], include: bool) -> None:
    out, stop = _run(pieces, stops, include=include)

    assert ("".join(out), stop) == _oracle("".join(pieces), stops, include=include)


def test_text_that_may_become_a_stop_is_held_back() -> None:
    finder = StopFinder(("world", "你好"))

    assert [finder.push(text) for text in ("a wo", "r", "n 你", "好")] == [
        ("a ", None), ("", None), ("worn ", None), ("", "你好"),
    ]  # fmt: skip


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopFinder(()).push("abc") == ("abc", None)
