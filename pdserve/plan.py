"""`pdserve plan`: measure what a server's steps cost, then simulate which layout would serve a load best."""

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from pdserve import simulate
from pdserve.bench.load.dialect import Chat, Completions
from pdserve.bench.load.endpoint import Endpoint
from pdserve.bench.load.session import get_json, open_session
from pdserve.calibration import calibrate
from pdserve.flags.parser import CommandParser
from pdserve.status_line import StatusLine
from pdserve.target_cluster import DEFAULT_URL
from wire.errors import ConfigError
from wire.step_cost import StepCost

_TIMEOUT_S = 300.0
EPILOG = """\
The command sends the server about thirty requests, for 10 minutes at most: first prompts of up to --longest-prompt
words, one at a time, for one token each, then 1 to 8 concurrent streams of short prompts. Their times show what a step
costs: a base, a part for each sequence in it, and a part for each prompt token. Any server with OpenAI's API will do;
it should serve nothing else meanwhile.

All other flags are those of `pdserve simulate`. The command then simulates the load, in virtual time, on each layout of
--instances such servers, with the scheduler's own dispatch, queue and placement. The last lines name the best layout,
which may be combined instances, and the chunk size that keeps gaps between tokens below the limit.

examples:
  pdserve plan --base-url http://10.0.0.18:8000 --instances 4 --rate 3 --input-len 2000 --output-len 200
  pdserve plan --instances 2 --trace mooncake.jsonl --plot layouts.svg
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0."""
    parser = CommandParser(
        prog="pdserve plan", description="Measure a server, and find the best layout for a load.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--base-url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--model", default="", help="the model to measure (default: the first in /v1/models)")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    parser.add_argument(
        "--longest-prompt", type=int, default=512, help="words of the longest prompt, 64 or more (default: 512)"
    )
    simulate.add_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.longest_prompt < 64:
        raise ConfigError(f"--longest-prompt {arguments.longest_prompt}: must be at least 64")
    simulate.check(arguments)  # before anything is measured
    began_s = time.monotonic()
    cost = asyncio.run(_measure(arguments.base_url.rstrip("/").removesuffix("/v1"), arguments))
    measured_s = time.monotonic() - began_s
    base, sequence, token = (1000 * value for value in (cost.base_s, cost.sequence_s, cost.token_s))
    if not arguments.json:
        print(
            f"a step takes {base:.3g} ms, plus {sequence:.3g} ms for each sequence and {token:.3g} ms for each prompt "
            f"token (measured in {measured_s:.0f} s)"
        )
    return simulate.run(arguments, cost)


async def _measure(url: str, arguments: argparse.Namespace) -> StepCost:
    async with open_session({}, _TIMEOUT_S, os.environ) as http:
        model = arguments.model or _first_model(url, await get_json(http, f"{url}/v1/models"))
        dialect = Chat(model) if arguments.chat else Completions(model)
        with StatusLine() as line:
            return await calibrate(Endpoint(http, url, dialect).send, arguments.longest_prompt, line.show)


def _first_model(url: str, listed: Any) -> str:
    match listed:
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise ConfigError(f"{url}/v1/models lists no model: set --model")
