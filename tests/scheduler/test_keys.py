"""API keys: where they come from, and that no path, method or header bypasses them."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from flags.options import EngineOptions
from scheduler.api.gate import Gate
from scheduler.app import build_app, open_routes
from scheduler.config import SchedulerConfig, SchedulerOptions, parse
from scheduler.http.keys import Keys, read_keys
from scheduler.http.listener import listen
from scheduler.http.server import serve as serve_app
from scheduler.observability.metrics import Metrics
from scheduler.request_class import UNCLASSED, RequestClass
from scheduler.serving import Cluster, open_serving
from tests.scheduler.conftest import Serve, Served
from wire.errors import ConfigError

pytestmark = pytest.mark.anyio
DEADLINE_S = 300.0
KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"
BEARER = (b"authorization", f"Bearer {KEY}".encode())
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO")
OPEN = ("/health", "/ready", "/ping", "/metrics")
CLOSED = (
    "/v1/models", "/v1/models/m", "/v1/completions", "/v1/chat/completions", "/load", "/version", "/tokenize", "/docs",
    "/openapi.json", "/none", "/", "", "*", "//health", "/health/", "/health/../v1/models", "/v1/../health", "/HEALTH",
    "/health%2f", "/health\x00", "/health?x", "/health#", "/metrics/", " /health", "/v1/models;/health",
)  # fmt: skip


async def _ask(
    app: Any, path: str, method: str = "GET", headers: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Call an app with exactly the path and headers that a server would pass."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"test"), *headers], "http_version": "1.1", "scheme": "http", "server": ("test", 80),
        "client": ("test", 1),
    }  # fmt: skip
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], dict(sent[0]["headers"]), body


def _app_with_keys(served: Served, **kwargs: Any) -> Any:
    return build_app(dataclasses.replace(served.context, keys=Keys([OTHER, KEY], **kwargs)))


@pytest.mark.covers("A2.32")
async def test_every_route_needs_a_key_except_the_open_ones(serve: Serve) -> None:
    async with serve(enable_docs=True, enable_tokenizer_info_endpoint=True, enable_dev_routes=True) as served:
        app, options = _app_with_keys(served), served.context.config.options
        paths = {route.path.replace("{name:path}", "x") for route in open_routes(options)} | set(CLOSED)
        statuses = {(path, method): (await _ask(app, path, method))[0] for path in paths for method in METHODS}

    assert {requested for requested, status in statuses.items() if status != 401} == {
        (path, method) for path in OPEN for method in METHODS
    }


@pytest.mark.covers("B.errors.5")
async def test_a_refusal_has_the_nested_envelope_the_scheme_and_an_id(serve: Serve) -> None:
    async with serve() as served:
        status, headers, body = await _ask(_app_with_keys(served), "/v1/models")

    assert (status, headers[b"www-authenticate"]) == (401, b"Bearer")
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("authentication_error", None, 401)
    assert headers[b"x-request-id"].startswith(b"req-")


@pytest.mark.parametrize(
    ("header", "scheme"),
    [(b"authorization", scheme) for scheme in (b"Bearer ", b"bearer ", b"BEARER   ")] + [(b"x-api-key", b"")],
)
@pytest.mark.parametrize("key", [KEY, OTHER])
async def test_any_of_the_keys_is_accepted(serve: Serve, header: bytes, scheme: bytes, key: str) -> None:
    async with serve() as served:
        status, _, _ = await _ask(_app_with_keys(served), "/v1/models", headers=[(header, scheme + key.encode())])

    assert status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-api-key", b"")], [(b"x-api-key", b"Bearer " + KEY.encode())], [(b"x-api-key", KEY.encode())] * 2,
        [(b"x-api-key", KEY.encode()), (b"authorization", b"Bearer x")],
        [(b"x-api-key", KEY.encode()), (b"authorization", b"")],
    ],
)  # fmt: skip
async def test_an_api_key_header_counts_alone_and_once(serve: Serve, headers: list[tuple[bytes, bytes]]) -> None:
    async with serve() as served:
        status, _, _ = await _ask(_app_with_keys(served), "/v1/models", headers=headers)

    assert status == 401


@pytest.mark.parametrize(
    "values",
    [
        [], [b""], [b"Bearer"], [b"Bearer "], [KEY.encode()], [b"Basic " + KEY.encode()], [f"Bearer {KEY}x".encode()],
        [f"Bearer {KEY[:-1]}".encode()], [f"Bearer {KEY.upper()}".encode()], [f"Bearer {KEY}, {KEY}".encode()],
        [b"Bearer \xff\xfe"], [b"Bearer x", f"Bearer {KEY}".encode()], [f"Bearer {KEY}".encode()] * 2,
    ],
)  # fmt: skip
async def test_anything_but_exactly_one_key_is_refused(serve: Serve, values: list[bytes]) -> None:
    async with serve() as served:
        status, _, _ = await _ask(
            _app_with_keys(served), "/v1/models", headers=[(b"authorization", value) for value in values]
        )

    assert status == 401


async def test_protected_metrics_need_a_key_other_open_paths_do_not(serve: Serve) -> None:
    async with serve() as served:
        app = _app_with_keys(served, protect_metrics=True)
        statuses = [(await _ask(app, path))[0] for path in OPEN]
        with_key = await _ask(app, "/metrics", headers=[BEARER])

    assert statuses == [200, 200, 200, 401]
    assert with_key[0] == 200


@pytest.mark.covers("B.headers.3")
async def test_the_root_path_is_removed_before_the_key_check(serve: Serve) -> None:
    async with serve(root_path="/llm") as served:
        app = _app_with_keys(served)
        paths = ("/llm/health", "/health", "/llm/v1/models", "/llmx/health", "/llm/llm/health", "/llm")
        bare = [(await _ask(app, path))[0] for path in paths]
        with_key = (await _ask(app, "/llm/v1/models", headers=[BEARER]))[0]

    assert bare == [200, 200, 401, 401, 401, 401]
    assert with_key == 200


@pytest.mark.parametrize(("keys", "headers"), [((), [BEARER]), ((KEY, OTHER), [BEARER])])
async def test_a_keys_tenant_is_stable_and_does_not_reveal_it(keys: Any, headers: Any) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["tenant"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    for metrics in (Metrics(), Metrics()):
        await _ask(Gate(app, metrics, {}, Keys(keys)), "/v1/models", headers=headers)

    assert seen[0] == seen[1]
    assert bool(seen[0]) == bool(keys)
    assert KEY not in seen[0]


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    "host", ["x/health?", "x/health#", "x/#", "@evil", "test/health", "/health", "x:80/health?a=", "..", ""]
)
@pytest.mark.parametrize(
    "target", ["/v1/models", "//health", "/v1/../health", "http://x/v1/models", "/v1/models?/health"]
)
async def test_no_host_header_bypasses_the_key(serve: Serve, host: str, target: str) -> None:
    async with serve() as served:
        bound, stop = listen("127.0.0.1", 0), asyncio.Event()
        task = asyncio.create_task(
            serve_app(_app_with_keys(served), bound, served.context.drain, shutdown_timeout_s=1.0, stop=stop)
        )
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()
        stop.set()
        await asyncio.wait_for(task, DEADLINE_S)

    assert answer.split(b" ", 2)[1] in (b"400", b"401")


@pytest.mark.covers("A2.32")
def test_flags_override_the_environment_and_our_variable_vllms(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n  {OTHER}  \r\nsecond\n")
    environ = {"PDSERVE_API_KEY": "ours\nours-too", "VLLM_API_KEY": "theirs"}

    def accepted(options: SchedulerOptions, environ: dict[str, str]) -> set[str]:
        keys = read_keys(options, environ)
        tried = (KEY, OTHER, "second", "ours", "ours-too", "theirs")
        return {key for key in tried if keys.admit("/v1", [(b"authorization", f"Bearer {key}".encode())])}

    model = ("--model", str(tmp_path))
    typed = parse([*model, "--api-key", KEY, "--api-key", "second"]).options
    assert accepted(typed, environ) == {KEY, "second"}
    assert accepted(parse([*model, "--api-key-file", str(file)]).options, environ) == {OTHER, "second"}
    assert accepted(parse([*model, "--api-key", KEY, "--api-key-file", str(file)]).options, {}) == {
        KEY, OTHER, "second",
    }  # fmt: skip
    assert accepted(parse(model).options, environ) == {"ours", "ours-too"}
    assert accepted(parse(model).options, {"PDSERVE_API_KEY": "", "VLLM_API_KEY": "theirs"}) == {"theirs"}
    assert len(read_keys(parse(model).options, {"PDSERVE_API_KEY": " \n"})) == 0


@pytest.mark.parametrize("key", ["", "with space", "tab\tkey", "ключ", "x" * 513])
def test_an_invalid_key_is_refused_without_quoting_it(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"--api-key: a key of {len(key)} characters") as refused:
        read_keys(SchedulerOptions(api_key=(KEY, key)), {})

    assert KEY not in str(refused.value)
    assert not key or key not in str(refused.value)


def _classed(tmp_path: Path, lines: str, classes: tuple[str, ...] = ("quick:ttft=2:gap=0.05", "batch:gap=1")) -> Any:
    (tmp_path / "keys").write_text(lines)
    return SchedulerOptions(api_key_file=str(tmp_path / "keys"), request_classes=classes)


QUICK, BATCH = RequestClass("quick", 2.0, 0.05), RequestClass("batch", None, 1.0)


@pytest.mark.parametrize(
    ("key", "name", "found"),
    [
        (KEY, None, BATCH), (KEY, "batch", BATCH), (KEY, "quick", QUICK), (KEY, "none", "may use batch, quick"),
        (OTHER, None, UNCLASSED), (OTHER, "quick", "may use none"), (OTHER, "", "may use none"),
        (KEY, ("batch", "quick"), "'batch, quick': this API key may use batch, quick"),
        ("third", None, BATCH), ("third", "quick", "may use batch"), ("third", "Batch", "may use batch"),
        (None, None, UNCLASSED), (None, "quick", QUICK), (None, "none", "may use quick, batch"),
    ],
)  # fmt: skip
async def test_a_request_has_a_class_that_its_key_may_use(
    serve: Serve, tmp_path: Path, key: str | None, name: str | tuple[str, ...] | None, found: RequestClass | str
) -> None:
    options = _classed(tmp_path, f"{KEY} batch, quick\n{OTHER}\nthird batch\n")
    names = (name,) if isinstance(name, str) else name or ()  # two that contradict are none
    headers = [("authorization", f"Bearer {key}"), *(("X-Pdserve-Class", one) for one in names)]
    async with serve(request_classes=options.request_classes) as served:
        context = dataclasses.replace(served.context, keys=read_keys(options, {}) if key else Keys())
        transport = httpx.ASGITransport(build_app(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            answer = await client.post("/v1/completions", json={"model": served.model, "prompt": "hello"})
        classes = [one.request_class for one in served.dispatcher.requests]

    if isinstance(found, str):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-pdserve-class")
        assert found in answer.json()["error"]["message"]
    assert classes == ([] if isinstance(found, str) else [found])


@pytest.mark.parametrize(
    ("lines", "classes", "message"),
    [
        ("key other", ("batch:gap=1",), "a key of 3 characters has a class that is not in --request-classes"),
        ("key batch,", ("batch:gap=1",), "a key of 3 characters has a class that is not in --request-classes"),
        ("key batch", (), "a key of 9 characters is invalid"),
        ("key", ("batch",), "'batch' is not NAME with ttft or gap"),
        ("key", ("batch:gap=1:gap=2",), "is not NAME with ttft or gap"),
        ("key", ("batch:gap=0",), "gap=0 is not a number of seconds above 0 and up to 3600"),
        ("key", ("batch:gap=nan",), "gap=nan is not"),
        ("key", ("batch:tpot=1",), "tpot=1 is not"),
        ("key", ("a:gap=1", "a:gap=2"), "'a' is named twice"),
        ("key", ("a b:gap=1",), "not a name of letters"),
    ],
)
def test_invalid_classes_stop_the_start(tmp_path: Path, lines: str, classes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_keys(_classed(tmp_path, lines, classes), {})

    assert message in str(refused.value)


def test_a_file_without_keys_or_unreadable_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")

    with pytest.raises(ConfigError, match="has no key"):
        read_keys(SchedulerOptions(api_key_file=str(tmp_path / "empty")), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(SchedulerOptions(api_key_file=str(tmp_path / "none")), {})


async def test_keys_appear_in_no_repr_help_log_or_answer(
    serve: Serve, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="pdserve")
    logging.getLogger("pdserve").addHandler(caplog.handler)
    try:
        async with serve() as served:
            app = _app_with_keys(served)
            reported = [
                (await _ask(app, path, headers=[(b"authorization", given)]))[2]
                for path in ("/v1/models", "/v1/none", "/metrics")
                for given in (f"Bearer {KEY}".encode(), f"Bearer {KEY}wrong".encode())
            ]
    finally:
        logging.getLogger("pdserve").removeHandler(caplog.handler)
    config = parse(["--model", "m", "--api-key", KEY])
    with suppress(SystemExit):
        parse(["--api-key", KEY, "--help"])

    assert KEY not in repr(config) + str(config) + caplog.text + capsys.readouterr().out + repr(reported)
    assert caplog.text


@pytest.mark.parametrize(("keys", "environ"), [((KEY,), {}), ((), {"VLLM_API_KEY": KEY})])
async def test_a_keyed_server_accepts_no_templates_of_requests(
    keys: tuple[str, ...], environ: dict[str, str], model_folder: Path
) -> None:
    config = SchedulerConfig(EngineOptions(model=str(model_folder)), SchedulerOptions(api_key=keys))
    body = {"messages": [{"role": "user", "content": "hello"}], "chat_template": "{{ 1 }}"}
    async with open_serving(config, Cluster((), lambda address: pytest.fail("no instance")), environ) as serving:
        transport = httpx.ASGITransport(serving.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/tokenize", json=body, headers={"authorization": f"Bearer {KEY}"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    assert "chat_template_not_allowed" in answer.json()["error"]["message"]


async def test_requests_without_a_key_never_enter_the_queue() -> None:
    begun = asyncio.Semaphore(0)

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        begun.release()
        await asyncio.Event().wait()

    gate = Gate(app, Metrics(), {}, Keys([KEY]))
    good = [asyncio.create_task(_ask(gate, "/v1/completions", "POST", [BEARER])) for _ in range(50)]
    await begun.acquire()
    refused = _ask(gate, "/v1/completions", "POST")
    with pytest.raises(StopIteration) as ended:
        refused.send(None)
    for task in good:
        task.cancel()
    await asyncio.gather(*good, return_exceptions=True)

    assert ended.value.value[0] == 401
