"""docs/chat-templates.md says the limits and names the templates that there are."""

import re
from pathlib import Path

from scheduler.templates import chat_options, templates
from scheduler.templates import lane as template_lane
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
    assert (templates._RENDER_S, templates._RENDER_TIMEOUT_S) == (1.0, 5.0)
    assert "| 1 s of a processor for compiling and rendering, 5 s by the clock |" in PAGE
    assert (templates._QUEUE_S, template_lane._MAX_HELD_BYTES) == (10.0, 64 * 2**20)
    assert "| 10 s, and 64 MiB in all |" in PAGE
    assert (templates._QUICK_BYTES, template_lane._AHEAD) == (2**20, 16)
    assert "conversations of over 1 MiB" in PAGE
    assert "Up to 16 conversations are sent ahead" in PAGE


def test_the_path_of_the_page_is_one_that_the_flag_takes() -> None:
    (typed,) = re.findall(r"--chat-template (\./examples/\S+)", PAGE)

    assert "<|im_start|>" in given_template(str(ROOT / typed), ROOT, {})
