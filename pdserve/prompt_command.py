"""The common part of `pdserve chat` and `pdserve complete`: choose the server, read texts and print answers."""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from pdserve.client import Client
from pdserve.flags.parser import CommandParser
from pdserve.target_cluster import DEFAULT_URL, START_HINT, find
from wire.errors import ConfigError, PdserveError, Unavailable

_SILENCE_S = 600.0
_PROMPT = "> "
_DIM, _BRIGHT = "\x1b[2m", "\x1b[0m"
EPILOG = """\
Texts are read from the terminal until Ctrl-D, or line by line from a pipe. Ctrl-C stops the answer in progress, or
else the command. A key is read from $PDSERVE_API_KEY or $VLLM_API_KEY unless --api-key is given.
"""


def prompt_parser(name: str, description: str, *, own_limit: str) -> CommandParser:
    """Return the parser with the flags of vLLM's command of this name; `own_limit` is our server's default limit."""
    parser = CommandParser(
        prog=f"pdserve {name}", description=description, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    default = f"the cluster of `pdserve up`, else {DEFAULT_URL}"
    parser.add_argument("--url", "--base-url", help=f"the OpenAI server (default: {default})")
    parser.add_argument("--model-name", metavar="NAME", help="the served model (default: the first of /v1/models)")
    parser.add_argument("--api-key", metavar="KEY", help="API key to send to the server")
    tokens_help = f"maximum tokens of an answer (default: the server's; pdserve's is {own_limit})"
    parser.add_argument("--max-tokens", type=int, metavar="N", help=tokens_help)
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0: always the likeliest token (default: the server's)"
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send only this text")
    return parser


def _no_text(choice: Mapping[str, Any]) -> str:
    return ""


class _Screen:
    """Prints one answer as it arrives; a terminal shows the thinking first, dimmed. Owns whether text is dimmed."""

    def __init__(self) -> None:
        self._is_dim = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._brighten("")

    def show(self, thinking: str, text: str) -> None:
        """Print a piece of the thinking and a piece of the answer; either may be empty."""
        if thinking and sys.stdout.isatty():
            print("" if self._is_dim else _DIM, _printable(thinking), sep="", end="", flush=True)
            self._is_dim = True
        if text:
            self._brighten("\n\n")
            print(_printable(text), end="", flush=True)

    def _brighten(self, after: str) -> None:
        if self._is_dim:
            print(_BRIGHT, end=after, flush=True)
            self._is_dim = False


class PromptCommand:
    """Sends one text at a time to one model of a server."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Raises ConfigError for an invalid URL, limit or temperature, Unavailable if the server has no model."""
        url = find(None, None).base_url if arguments.url is None else arguments.url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: use http://HOST:PORT")
        self._fields = _fields(arguments.max_tokens, arguments.temperature)
        self._quick: str | None = arguments.quick
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._client = Client(url, timeout_s=_SILENCE_S, api_key=arguments.api_key)
        self._model = arguments.model_name or self._first_model(url)

    def run(
        self, path: str, body: Callable[[str], Mapping[str, Any]], on_answer: Callable[[str, str], None],
        read_choice: Callable[[Mapping[str, Any]], str], read_thinking: Callable[[Mapping[str, Any]], str] = _no_text,
    ) -> int:  # fmt: skip
        """Send `body(text)` for each text and print what `read_choice` reads; `on_answer` gets the text and its answer.

        A terminal shows what `read_thinking` reads, too. With --quick a server error is raised; else it is printed, and
        the next text is read.
        """
        for text in self._texts():
            answer: list[str] = []
            try:
                fields = {"model": self._model, **self._fields, **body(text)}
                with _Screen() as screen:
                    for event in self._client.stream(f"{self._prefix}{path}", fields):
                        for choice in event.get("choices") or ():
                            answer.append(read_choice(choice))
                            screen.show(read_thinking(choice), answer[-1])
            except KeyboardInterrupt:
                if self._quick is not None:
                    print(flush=True)
                    raise
            except PdserveError as error:
                if answer:
                    print(flush=True)
                if self._quick is not None:
                    raise _with_advice(error) from error.__cause__
                print(_with_advice(error), file=sys.stderr, flush=True)
                continue
            print(flush=True)
            on_answer(text, "".join(answer))
        return 0

    def _first_model(self, url: str) -> str:
        try:
            reply = self._client.get(f"{self._prefix}/v1/models")
        except Unavailable as error:
            raise _with_advice(error) from error.__cause__
        if reply.status == 401:
            raise ConfigError(f"{url} requires a valid API key: set --api-key or PDSERVE_API_KEY")
        try:
            return str(reply.json()["data"][0]["id"])
        except (TypeError, KeyError, IndexError):
            failure = f"{url} lists no model (GET /v1/models: {reply.status})"
            raise Unavailable(f"{failure}: is this the URL of an OpenAI server?") from None

    def _texts(self) -> Iterator[str]:
        """Yield the texts to send, without blank lines."""
        if self._quick is not None:
            yield self._quick
            return
        lines = _read_terminal() if sys.stdin.isatty() else sys.stdin
        yield from (line for line in map(str.rstrip, lines) if line)


def _fields(max_tokens: int | None, temperature: float | None) -> dict[str, float]:
    """Return the fields of every request; the server chooses those not given. Raises ConfigError."""
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens}: must be at least 1")
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature {temperature:g}: must be 0 or more")
    fields = {"max_tokens": max_tokens, "temperature": temperature}
    return {name: value for name, value in fields.items() if value is not None}


def _with_advice(error: PdserveError) -> PdserveError:
    """Return the error, with advice if nothing listens at the URL."""
    return Unavailable(f"{error}; {START_HINT}") if isinstance(error.__cause__, ConnectionRefusedError) else error


def _read_terminal() -> Iterator[str]:
    try:
        while True:
            yield input(_PROMPT)
    except EOFError:
        print(flush=True)


def _printable(text: str) -> str:
    """Return a model's text without the control characters that a terminal would interpret."""
    if not sys.stdout.isatty():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
