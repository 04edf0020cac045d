"""The cost of a chat template to the scheduler: microseconds of CPU time and of wall time for each render.

    python -P benchmarks/chat_templates.py
    python -P benchmarks/chat_templates.py --template examples/template_llama3.jinja --chars 16000

Conversations of two messages are rendered one at a time, then by many streams at once, on the scheduler's event loop.
`cpu_us` excludes the processes that render, `clock_us` includes them. JSON, one line for each number of streams.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from scheduler.loop import run
from scheduler.templates.templates import TemplateRenderer

CHATML = Path(__file__).parents[1] / "examples" / "template_chatml.jinja"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", type=Path, default=CHATML)
    parser.add_argument("--chars", type=int, default=256, help="characters of the user's message")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--renders", type=int, default=4000)
    run(measure(parser.parse_args()))


async def measure(args: argparse.Namespace) -> None:
    """Print a line for each number of streams."""
    template = args.template.read_text(encoding="utf-8")
    renderer = TemplateRenderer()
    try:
        await renderer.start(template)
        await timed(renderer, template, args.chars, 1, args.renders // 10)
        for streams in args.streams:
            cpu, clock = await timed(renderer, template, args.chars, streams, args.renders)
            print(json.dumps({"streams": streams, "cpu_us": round(cpu, 1), "clock_us": round(clock, 1)}))
    finally:
        await renderer.close()


async def timed(
    renderer: TemplateRenderer, template: str, chars: int, streams: int, renders: int
) -> tuple[float, float]:
    """Return microseconds per render: of this process's CPU time, and of wall time."""
    context: dict[str, Any] = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x" * chars}],
        "add_generation_prompt": True,
    }

    async def stream() -> None:
        for _ in range(renders // streams):
            await renderer.render(template, context)

    cpu, clock = time.process_time(), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    made = renders // streams * streams
    return (time.process_time() - cpu) / made * 1e6, (time.perf_counter() - clock) / made * 1e6


if __name__ == "__main__":
    main()
