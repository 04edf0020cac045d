"""The error of the ranktable tools: invalid input, described in one line."""


class RanktableError(Exception):
    """Invalid input; the message is one line naming file or variable, place and value. Commands exit with status 2.

    `code` is the violated rule, `place` the JSON path and `value` the value there, for `lint --format json`.
    """

    def __init__(self, message: str, *, code: str = "input", place: str = "", value: object = None) -> None:
        super().__init__(" ".join(message.splitlines()))
        self.code = code
        self.place = place
        self.value = value
