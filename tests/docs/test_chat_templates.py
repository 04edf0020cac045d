"""docs/chat-templates.md gives the limits and names the available templates."""

import re
from pathlib import Path

from scheduler.templates import chat_options, template_queue, templates
from scheduler.templates import sandbox as template_sandbox
from scheduler.templates.files import given_template

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "chat-templates.md").read_text(encoding="utf-8")


def test_every_template_of_the_examples_is_named_once() -> None:
    files = sorted(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.jinja"))

    assert re.findall(r"^\| `(examples/[\w.]+)` \|", PAGE, re.MULTILINE) == files


def test_the_limits_are_those_of_the_code() -> None:
    assert chat_options.MAX_TEMPLATE_BYTES == 256 * 2**10
    assert "At most 256 KiB." in PAGE
    assert chat_options.MAX_KWARGS_BYTES == 64 * 2**10
    assert "At most 64 KiB as JSON." in PAGE
    assert (template_sandbox._RENDER_BYTES, template_sandbox._COPIES) == (64 * 2**20, 4)
    assert "| 64 MiB above the idle process, and four times what was sent to it |" in PAGE
    assert template_sandbox._KEPT_BYTES == 16 * 2**20
    assert template_sandbox.MAX_OUTPUT_CHARS == 8 * 2**20
    assert (templates._RENDER_S, templates._RENDER_TIMEOUT_S) == (1.0, 30.0)
    assert "| 1 s of a processor for compiling and rendering, 30 s by the clock |" in PAGE
    assert (templates._QUEUE_S, template_queue._MAX_HELD_BYTES) == (60.0, 64 * 2**20)
    assert "| 60 s, and 64 MiB in all |" in PAGE
    assert (templates._QUICK_BYTES, template_queue._AHEAD) == (2**20, 16)
    assert "conversations of over 1 MiB" in PAGE
    assert "Up to 16 conversations are sent ahead" in PAGE


def test_a_thirtieth_of_a_core_is_enough_for_a_render_and_a_start() -> None:
    assert templates._RENDER_TIMEOUT_S >= 30 * templates._RENDER_S
    assert templates._QUEUE_S >= 2 * templates._RENDER_TIMEOUT_S
    assert template_queue._START_S >= 30, "its imports take a second"


def test_the_pages_example_path_is_accepted_by_the_flag() -> None:
    (path,) = re.findall(r"--chat-template (\./examples/\S+)", PAGE)

    assert "<|im_start|>" in given_template(str(ROOT / path), ROOT, {})
