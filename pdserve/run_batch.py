"""`pdserve run-batch`: answer a file of requests, with a model in this process or a running server."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from batch.input_file import UnusableLines
from batch.job import BatchJob, BatchStopped, InputLimits, RetryPolicy
from batch.prepared_job import PreparedJob, prepare
from batch.runner import BatchProgress, run_batch
from pdserve.batch_run.backend_choice import BatchServer, LocalModel, NoBackend, check_models, local_model, server
from pdserve.batch_run.files import BatchFiles, local_files, send
from pdserve.batch_run.interruption import Interruption
from pdserve.batch_run.metrics import serve_metrics
from pdserve.batch_run.progress import ProgressView
from pdserve.batch_run.request import BatchRequest, parse
from pdserve.batch_run.summary import command_again, counted
from pdserve.engine_flags import check_engine_flags
from pdserve.ports import require_free
from telemetry import logs
from wire.errors import ConfigError, PdserveError

_QUIET = "WARNING"  # unless --log-level is given: stderr shows the progress bar


def main(argv: Sequence[str], command: Sequence[str] = ("pdserve", "run-batch")) -> int:
    """Run the batch; `command` is the command line before `argv`. Raises PdserveError.

    A signal leaves a resumable batch: the exit status is 130 or 143, and stderr shows the command that resumes it.
    """
    request = parse(argv)
    engine = request.engine
    logs.configure(engine.log_level if "log_level" in request.typed else _QUIET, log_format=engine.log_format)
    view = ProgressView(max_inflight=request.max_inflight)
    with Interruption() as interruption:
        try:
            _run(request, interruption, view)
        except KeyboardInterrupt:
            again = command_again(command, argv)
            _say(f"stopped: {view.line()}; resume with\n  {again}")
            return interruption.status
        except UnusableLines as error:
            print(f"{' '.join(command)}: {error}", file=sys.stderr, flush=True)  # one line for each bad line
            return 2
    return 0


def _say(text: str) -> None:
    """Print to stderr; the same Ctrl-C may have ended its reader, such as a pager."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - else the interpreter fails at exit on the unwritten text


def _run(request: BatchRequest, interruption: Interruption, view: ProgressView) -> None:
    answers: BatchServer | None = None
    if request.options.base_url is None:
        check_engine_flags(request.engine)
    else:
        answers = server(request)
    if request.metrics is not None:
        require_free(*request.metrics)
    with local_files(request, interruption, os.environ) as files:
        if files.is_answered:
            send(request, files, interruption)
            print(f"the answers of an earlier run were uploaded: {files.target}", flush=True)
            return
        with prepare(_make_job(request, files)) as prepared:
            source = (answers or local_model(request)) if prepared.left else None
            ended: list[BatchProgress] = []
            with _explain_resuming(prepared), _ignore_late_interrupt(ended):
                interruption.run(_answer(request, prepared, source, view, ended.append))
        if files.target is not None:
            send(request, files, interruption)
        print(f"{_summary(view, ended[0])}: {files.target or files.output}", flush=True)
        for warning, count in ended[0].warnings.items():
            print(f"warning: {warning} ({count} line{'s' * (count > 1)})", file=sys.stderr, flush=True)
        if ended[0].first_error:
            error = f"the first error is {ended[0].first_error}"
            print(f"{error}{_name_advice(request, error)}{_retry_advice(files)}", file=sys.stderr, flush=True)


async def _answer(
    request: BatchRequest, prepared: PreparedJob, source: LocalModel | BatchServer | None, view: ProgressView,
    ended: Callable[[BatchProgress], None],
) -> None:  # fmt: skip
    """Answer the remaining lines and write the output; show progress, and serve metrics where requested.

    `ended` is called once the output is written.
    """
    async with contextlib.AsyncExitStack() as stack:
        backend = NoBackend() if source is None else await stack.enter_async_context(source.opened())
        if prepared.left:
            await check_models(backend, prepared.earlier.models, prepared.earlier.place)
        if request.metrics is not None:
            engine = backend if isinstance(source, LocalModel) else None
            await stack.enter_async_context(serve_metrics(*request.metrics, lambda: view.last, engine))
        await stack.enter_async_context(view.kept())
        ended(await run_batch(prepared, backend, on_progress=view.take))


@contextlib.contextmanager
def _ignore_late_interrupt(ended: Sequence[BatchProgress]) -> Iterator[None]:
    """Once the output is written, ignore Ctrl-C: it only stops the engine sooner, and a rerun would start over."""
    try:
        yield
    except KeyboardInterrupt:
        if not ended:
            raise


@contextlib.contextmanager
def _explain_resuming(prepared: PreparedJob) -> Iterator[None]:
    """When the engine or server fails, add to the error how to resume the batch."""
    try:
        yield
    except (BatchStopped, ConfigError):
        raise
    except PdserveError as error:
        if not prepared.journal.num_done:
            raise
        done = f"{prepared.journal.num_done} of {prepared.total} lines are answered and saved"
        raise BatchStopped(f"{error}; {done}: the same command resumes there") from error


def _make_job(request: BatchRequest, files: BatchFiles) -> BatchJob:
    options = request.options
    return BatchJob(
        files.input,
        files.output,
        files.error,
        request.answer_settings,
        request.max_inflight,
        InputLimits(options.max_input_bytes, options.max_input_lines, options.max_line_bytes),
        RetryPolicy(timeout_s=request.request_timeout_s),
        options.retry_failed,
    )


def _name_advice(request: BatchRequest, error: str) -> str:
    """Return advice for lines that name a model other than the one loaded here."""
    if request.options.base_url is not None or "does not exist here" not in error:
        return ""
    return "\n--served-model-name NAME gives the model loaded here the name in the lines"


def _retry_advice(files: BatchFiles) -> str:
    if files.target is not None:
        return ""
    advice = "the same command with --retry-failed retries the failed lines"
    return f"\n{advice}; a line that was refused (400 to 422) must be fixed in the input first"


def _summary(view: ProgressView, ended: BatchProgress) -> str:
    earlier = f", {ended.resumed:,} of them by an earlier run" if ended.resumed else ""
    return counted(ended.done, ended.errors, view.seconds, view.rates()[1]) + earlier
