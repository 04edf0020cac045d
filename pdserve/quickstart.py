"""Run by scripts/quickstart once pdserve is installed: start a cluster, ask one question, print next steps."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from flags.options import Parser
from pdserve import up
from pdserve.client import Client
from pdserve.guarded import guarded
from pdserve.question import ask, served_model
from pdserve.readiness import check_ready
from pdserve.run_folder import RunFolder, default_run_dir
from wire.errors import PdserveError, Unavailable

DEFAULT_PORT = 9000
QUESTION = "What is the capital of France, and what is it known for?"
_ANSWER_TIMEOUT_S = 120.0

NEXT = """\
The cluster keeps serving. Try next:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
  the openai client (pip install openai): OpenAI(base_url="{url}/v1", api_key="EMPTY")
  .venv/bin/pdserve status
  .venv/bin/pdserve down
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Ask a running cluster, or start one first; the flags are those of `pdserve up`."""
    flags = list(sys.argv[1:] if argv is None else argv)
    return guarded("quickstart", lambda: _run(flags))


def _run(flags: Sequence[str]) -> int:
    known = _parse_known(flags)
    folder, port = RunFolder(Path(known.run_dir or default_run_dir(os.environ)).absolute()), known.port
    try:
        url = serving(folder, port)
        if url is not None:
            print(f"using the cluster that already serves at {url}", flush=True)
        else:
            up.require_none(folder)
            print("starting a cluster: one scheduler, one prefill and one decode instance", flush=True)
            status = _up(flags)
            if status != 0:
                return status  # Ctrl-C or SIGTERM; other failures are raised
            url = serving(folder, port)
        if url is None:
            raise Unavailable("the cluster was ready but has stopped")
        _ask_question(url)
    except PdserveError as error:
        raise type(error)(f"{error} (logs: {folder.log('*').parent})") from error
    return 0


def serving(folder: RunFolder, port: int) -> str | None:
    """Return the URL of a ready cluster: the run folder's, else one on `port`."""
    state = folder.read()
    urls = [state.base_url] if state is not None and state.is_up else []
    urls.append(f"http://127.0.0.1:{port}")
    return next((url for url in urls if check_ready(Client(url, timeout_s=5.0))[0]), None)


def _up(flags: Sequence[str]) -> int:
    """Start a cluster in the background; return the exit status and restore the signal handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return up.main(["--detach", *flags])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parse_known(flags: Sequence[str]) -> argparse.Namespace:
    parser = Parser(add_help=False)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--run-dir")
    return parser.parse_known_args(list(flags))[0]


def _ask_question(url: str) -> None:
    client = Client(url, timeout_s=_ANSWER_TIMEOUT_S)
    model = served_model(client)
    print(f"asking {model} at {url}\n> {QUESTION}", flush=True)
    times = ask(client, model, QUESTION, lambda text: print(text, end="", flush=True))
    print(f"\n\n{times}\n")
    print(NEXT.format(url=url, model=model), end="")


if __name__ == "__main__":
    sys.exit(main())
