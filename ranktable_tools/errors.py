"""The error of the ranktable tools: bad input, told in one line."""


class RanktableError(Exception):
    """Input is wrong; the message is one line naming file or variable, place and value. Commands end with status 2.

    `code` is the rule that found it, `place` the JSON path and `value` what stands there, for `lint --format json`.
    """

    def __init__(self, message: str, *, code: str = "input", place: str = "", value: object = None) -> None:
        super().__init__(" ".join(message.splitlines()))
        self.code = code
        self.place = place
        self.value = value
