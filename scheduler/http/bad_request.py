"""The server's answer to bytes that are not a valid request, before routing."""

MAX_HEAD_BYTES = 64 * 2**10
MAX_HEADERS = 128


class HeadTooLarge(Exception):
    """The part being parsed exceeds a limit."""


class NotHttp1(Exception):
    """The request's version is not HTTP/1.0 or 1.1, or it does not have exactly one Host."""


def refusal(why: BaseException | None) -> bytes:
    """Return the complete answer, which closes the connection; `why` is None if the parser failed."""
    line, message = b"400 Bad Request", "this is not HTTP/1.1"
    if isinstance(why, NotHttp1):
        message = "a request must be HTTP/1.0 or 1.1 and name one Host"
    elif isinstance(why, HeadTooLarge):
        line = b"431 Request Header Fields Too Large"
        message = f"the head has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} fields"
    kind = '"type":"invalid_request_error","param":null'
    body = f'{{"error":{{"message":"{message}",{kind},"code":{line[:3].decode()}}}}}'.encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (line, len(body)) + body
