"""The error of the ranktable tools: bad input, told in one line."""


class RanktableError(Exception):
    """Input is wrong; the message is one line naming file or variable, place and value. Commands end with status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))
