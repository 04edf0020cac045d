"""Chat templates in their own processes: right text, no escape, no hang, no blocking of other requests."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from scheduler.templates.templates import TemplateRenderer
from wire.errors import InvalidRequest, Overloaded, Unavailable

pytestmark = pytest.mark.anyio

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDED = "more than 1 s of CPU time"
WAIT_S = 300.0  # on a busy machine a template's second of CPU time takes many seconds of wall time


@pytest.fixture(scope="module", params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops that the scheduler runs on: they start processes by different code."""
    if request.param:
        pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    """A renderer whose processes end with the test."""
    made = TemplateRenderer(render_timeout_s=WAIT_S, queue_timeout_s=WAIT_S)
    yield made
    await made.close()


async def test_it_renders_the_constructs_of_models_templates(renderer: TemplateRenderer) -> None:
    template = (
        "{%- for message in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "  {{- message | tojson }}\n{%- endfor %}\n{% generation %}{{ eos_token }}{% endgeneration %}"
    )
    context = {"messages": [{"content": "<你>"}, {"content": "b"}], "eos_token": "</s>"}

    assert await renderer.render(template, context) == '{"content": "<你>"}</s>'


async def test_content_format_and_open_message_reach_the_process(renderer: TemplateRenderer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    template = "{{ messages[0].content }}!"

    assert await renderer.render(template, {"messages": messages}) == "a\nb!"
    assert (
        await renderer.render(template, {"messages": messages}, content_format="openai") == f"{messages[0]['content']}!"
    )
    assert await renderer.render(template, {"messages": messages}, continue_final_message=True) == "a\nb"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{% for i in range(9**9) %}{% endfor %}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 8388608 characters"),
    ],
)
async def test_a_bad_template_fails_the_request_with_its_own_message(
    renderer: TemplateRenderer, template: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        await renderer.render(template, {"messages": []}, of_request=True)

    assert refused.value.param == "chat_template"
    assert await renderer.render("fine", {}, of_request=True) == "fine"


@pytest.mark.often("uvloop")
async def test_a_killed_process_loses_no_other_request(renderer: TemplateRenderer) -> None:
    """A template of one request never ends; those before and behind it in its queue are still answered."""
    await renderer.render("warm", {}, of_request=True)
    jobs = [asyncio.create_task(renderer.render("{{ n }}", {"n": n}, of_request=True)) for n in range(3)]
    endless = asyncio.create_task(renderer.render(ENDLESS, {}, of_request=True))
    jobs += [asyncio.create_task(renderer.render("{{ n }}", {"n": n}, of_request=True)) for n in range(3, 30)]

    assert await asyncio.gather(*jobs) == [str(n) for n in range(30)]
    with pytest.raises(InvalidRequest, match=ENDED):
        await endless


@pytest.mark.often("uvloop")
async def test_a_template_has_a_limit_of_wall_time_too() -> None:
    renderer = TemplateRenderer(render_s=30, render_timeout_s=0.5)
    try:
        endless, behind = (asyncio.create_task(renderer.render(template, {})) for template in (ENDLESS, "x"))
        with pytest.raises(InvalidRequest, match=r"longer than 0\.5 s"):
            await endless
        renderer._quick._render_timeout_s = WAIT_S  # for the template behind it, which may wait for a core

        assert await behind == "x"
    finally:
        await renderer.close()


async def test_a_requests_template_blocks_no_chat_with_the_models_own() -> None:
    renderer = TemplateRenderer(WAIT_S, WAIT_S, WAIT_S)  # so the endless one ends only when it is killed
    try:
        await asyncio.gather(renderer.start("x"), renderer.render("warm", {}, of_request=True))
        endless = asyncio.create_task(renderer.render(ENDLESS, {}, of_request=True))
        large = asyncio.create_task(renderer.render("{{ s | length }}", {"s": "x" * 2**20}))

        assert await renderer.render("{{ n }}", {"n": 1}) == "1"
        assert not endless.done(), "the model's own template has another queue"
        assert not large.done(), "a large job waits where others may be slow"
        os.kill(renderer.pids[1], signal.SIGKILL)
        with pytest.raises(InvalidRequest, match=f"more than {WAIT_S:g} s of CPU time"):
            await endless
        assert await large == str(2**20)
    finally:
        await renderer.close()


@pytest.mark.often("uvloop")
async def test_a_render_waiting_too_long_is_answered_with_retry_after() -> None:
    renderer = TemplateRenderer(WAIT_S, WAIT_S, WAIT_S)
    try:
        await renderer.start("")
        renderer._quick._queue_timeout_s = 0.2
        jobs = [renderer.render(text, {}) for text in (ENDLESS, "fine")]
        ends = await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        await renderer.close()

    assert [type(end) for end in ends] == [Overloaded, Overloaded]


async def test_a_process_that_died_is_replaced(renderer: TemplateRenderer) -> None:
    await renderer.start("x")
    (first,) = renderer.pids
    os.kill(first, signal.SIGKILL)

    assert await _retried(renderer) == "fine"
    assert renderer.pids != (first,)


async def _retried(renderer: TemplateRenderer) -> str:
    """Retry a render that was on its way to a process just killed: it may be taken for the cause."""
    try:
        return await renderer.render("fine", {})
    except InvalidRequest:
        return await renderer.render("fine", {})


async def test_nothing_runs_between_fork_and_exec(renderer: TemplateRenderer) -> None:
    """A library with threads may run handlers there, as gRPC does, which sometimes crash: the process never starts.

    Python calls its own handlers wherever a fork calls those of libraries.
    """
    forks = list[str]()
    os.register_at_fork(before=lambda: forks.append("fork"))

    await renderer.start("x")

    assert forks == []


async def test_the_process_imports_our_packages_and_not_their_modules(renderer: TemplateRenderer) -> None:
    """With scheduler/ itself on its path, `import queue` or `import http` would find ours instead of Python's."""
    await renderer.start("x")

    for pid in renderer.pids:
        assert psutil.Process(pid).environ()["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).parents[2])


async def test_simultaneous_renders_are_answered_in_their_order(renderer: TemplateRenderer) -> None:
    texts = await asyncio.gather(*(renderer.render(f"{n % 3} {{{{ n }}}}", {"n": n}) for n in range(100)))

    assert texts == [f"{n % 3} {n}" for n in range(100)]


async def test_a_cancelled_render_leaves_no_answer_for_the_next(renderer: TemplateRenderer) -> None:
    await renderer.start("x")
    slow = asyncio.create_task(renderer.render("{% for i in range(99999) %}{% endfor %}slow", {}))
    await asyncio.sleep(0)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow

    assert await renderer.render("next", {}) == "next"


async def test_a_large_conversation_is_rendered() -> None:
    """Five million characters are more than a pipe, more than a million tokens, and less than the limits."""
    content = "你好" * 2_500_000
    renderer = TemplateRenderer(render_s=30, render_timeout_s=30)
    try:
        text = await renderer.render("{{ messages[0].content }}", {"messages": [{"content": content}]})
    finally:
        await renderer.close()

    assert text == content


async def test_a_context_that_is_not_json_fails_its_request(renderer: TemplateRenderer) -> None:
    with pytest.raises(InvalidRequest, match="cannot be passed to its chat template"):
        await renderer.render("x", {"messages": [], "a": "\ud800"})


async def test_more_waiting_bytes_than_the_limit_are_refused(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.templates.template_queue._MAX_HELD_BYTES", 1000)
    first = asyncio.create_task(renderer.render("{{ a }}", {"a": "x" * 2000}))
    await asyncio.sleep(0)

    with pytest.raises(Overloaded, match="bytes would wait for chat templates, but the limit is 1000"):
        await renderer.render("{{ a }}", {})
    assert await first == "x" * 2000
    assert await renderer.render("{{ a }}", {"a": 1}) == "1"


async def test_chats_fail_with_a_reason_if_no_template_process_starts(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    ends = await asyncio.gather(*(renderer.render("x", {}) for _ in range(3)), return_exceptions=True)

    assert [type(end) for end in ends] == [Unavailable] * 3
    with pytest.raises(Unavailable, match="did not start"):
        await renderer.start("x")
    monkeypatch.undo()
    assert await renderer.render("fine", {}) == "fine"


async def test_closing_ends_the_processes_and_fails_waiting_renders(renderer: TemplateRenderer) -> None:
    await renderer.start("x")
    waiting = asyncio.create_task(renderer.render(ENDLESS, {}))
    await asyncio.sleep(0)

    await renderer.close()

    assert renderer.pids == ()
    with pytest.raises(Unavailable, match="is shutting down"):
        await waiting
