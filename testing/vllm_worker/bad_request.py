"""How a fake vLLM worker refuses a request."""


class BadRequest(Exception):
    """vLLM refuses the body with `status` and this message."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param
