"""The progress bar of a run: what it counts, and when it is silent."""

from typing import Any

from pdserve import CompletionOutput, RequestOutput
from pdserve.offline.progress import ProgressBar

OUTPUT = RequestOutput("r", "p", [1] * 30, None, [CompletionOutput(0, "t", [2] * 10, None, None, "length")])


class Bar:
    """A stub of tqdm, as far as it is used."""

    def __init__(self, **reported: Any) -> None:
        self.reported, self.count, self.postfix, self.closed = reported, 0, "", False
        self.format_dict = {"elapsed": 2.0}

    def update(self, count: int) -> None:
        self.count += count

    def close(self) -> None:
        self.closed = True


def test_it_counts_prompts_and_shows_tokens_per_second() -> None:
    bars: list[Bar] = []

    def make(**reported: Any) -> Bar:
        bars.append(Bar(**reported))
        return bars[0]

    with ProgressBar(2, make) as progress:
        progress.done(OUTPUT)
        progress.done(OUTPUT)

    assert (bars[0].reported["total"], bars[0].reported["desc"]) == (2, "Processed prompts")
    assert (bars[0].count, bars[0].closed) == (2, True)
    assert bars[0].postfix == "est. speed input: 30.00 toks/s, output: 10.00 toks/s"


def test_it_is_silent_without_a_terminal_or_if_disabled(capfd: Any) -> None:
    for wanted in (True, False):  # standard error is not a terminal here
        with ProgressBar(1, wanted) as progress:
            progress.done(OUTPUT)

    assert capfd.readouterr().err == ""
