"""The progress bar of a run: finished prompts, input and output tokens per second."""

from collections.abc import Callable
from typing import Any, Self

from pdserve.offline.outputs import RequestOutput

UseTqdm = bool | Callable[..., Any]


class ProgressBar:
    """A bar on stderr if that is a terminal. Owns the counts. Use as a context manager."""

    def __init__(self, total: int, use_tqdm: UseTqdm, what: str = "Processed prompts") -> None:
        """`use_tqdm`: whether to show a bar, or a replacement for tqdm."""
        self._bar = _make_bar(total, use_tqdm, what)
        self._tokens_in = self._tokens_out = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def done(self, output: RequestOutput) -> None:
        """Count a finished prompt."""
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(one.token_ids) for one in output.outputs)
        self.step(1)

    def step(self, count: int) -> None:
        """Advance the bar by `count` without counting tokens."""
        if self._bar is None:
            return
        elapsed_s = self._bar.format_dict.get("elapsed") or 0.0
        if self._tokens_in and elapsed_s > 0:
            rates = (tokens / elapsed_s for tokens in (self._tokens_in, self._tokens_out))
            self._bar.postfix = "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*rates)
        self._bar.update(count)


def _make_bar(total: int, use_tqdm: UseTqdm, what: str) -> Any:
    if not use_tqdm:
        return None
    arguments: dict[str, Any] = {"total": total, "desc": what, "dynamic_ncols": True}
    if callable(use_tqdm):
        return use_tqdm(**arguments)
    from tqdm import tqdm

    return tqdm(**arguments, disable=None)
