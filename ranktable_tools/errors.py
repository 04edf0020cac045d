"""The error of the ranktable tools: invalid input, described in one line."""


class RanktableError(Exception):
    """Invalid input; the message is one line naming file or variable, place and value. Commands exit with status 2.

    `code` is the violated rule, `json_path` is where, and `value` the value there, for `lint --format json`.
    """

    def __init__(self, message: str, *, code: str = "input", json_path: str = "", value: object = None) -> None:
        super().__init__(" ".join(message.splitlines()))
        self.code = code
        self.json_path = json_path
        self.value = value
