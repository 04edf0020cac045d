"""The scheduler's counters and histograms, updated while requests run; metrics.py and vllm_metrics.py expose them."""

from collections import Counter, defaultdict

from scheduler.observability.request_done import RequestDone
from scheduler.request import GenerationRequest, PromptDone
from telemetry.bucket_bounds import DEFAULT_MODEL_LEN, HOP_SECONDS, vllm_tokens
from telemetry.histogram import BucketHistogram
from telemetry.metric_table import REQUESTS, MetricKind, MetricRow
from wire.types import STAGES

REASONS = ("stop", "length", "abort", "error", "repetition")


class SchedulerCounters:
    """Mutable, owned by the event loop. The Observer of text streams.

    Each value is stored once, with the bucket boundaries of all metrics that expose it (telemetry/metric_table.py).
    """

    first_token: BucketHistogram
    between_tokens: BucketHistogram
    mean_between: BucketHistogram
    whole: BucketHistogram
    queue: BucketHistogram
    inference: BucketHistogram
    prefill: BucketHistogram
    decode: BucketHistogram
    request_prompt_tokens: BucketHistogram
    request_computed_tokens: BucketHistogram
    request_output_tokens: BucketHistogram
    max_tokens: BucketHistogram
    n: BucketHistogram
    preemptions: BucketHistogram
    hop: BucketHistogram
    hop_bytes: BucketHistogram
    overlap: BucketHistogram

    def __init__(self, max_model_len: int = DEFAULT_MODEL_LEN) -> None:
        self.token_bounds = vllm_tokens(max_model_len)
        for row in REQUESTS:
            if row.kind is MetricKind.HISTOGRAM and not row.labels:
                setattr(self, row.source, self._make_histogram(row))
        self.stages = {stage: BucketHistogram(HOP_SECONDS) for stage in STAGES}
        self.kv_bytes = self.kv_bytes_early = 0
        self.prompt_tokens = self._first_tokens = 0
        self.token_gap = self.between_tokens.observe
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.path_seconds: defaultdict[str, float] = defaultdict(float)
        self.path_expected: defaultdict[str, float] = defaultdict(float)
        self.http: Counter[tuple[str, str, str]] = Counter()

    def first_token_came(self, request: GenerationRequest, seconds: float) -> None:
        """Count a request's first token, `seconds` after its arrival; its prompts are now computed."""
        self.first_token.observe(seconds)
        self.prompt_tokens += sum(map(len, request.prompts))

    def choice_started(self) -> None:
        """Count the first token of a choice."""
        self._first_tokens += 1

    @property
    def output_tokens(self) -> int:
        """Tokens so far: each choice's first token, and one for each measured gap between two tokens."""
        return self._first_tokens + self.between_tokens.count

    def prompt_done(self, done: PromptDone) -> None:
        """Count the path and the stages of one prompt, and its KV transfer if there was one."""
        times = done.times
        self.paths[done.path] += 1
        if done.expected_s:
            self.path_seconds[done.path] += done.seconds
            self.path_expected[done.path] += done.expected_s
        for stage, histogram in self.stages.items():
            seconds = getattr(times, f"{stage}_s")
            if seconds is not None:
                histogram.observe(seconds)
        if times.send_s is not None and times.kv_bytes:
            self.hop.observe(times.send_s)
            self.hop_bytes.observe(times.kv_bytes)
            self.overlap.observe(times.kv_bytes_early / times.kv_bytes)
            self.kv_bytes += times.kv_bytes
            self.kv_bytes_early += times.kv_bytes_early

    def request_done(self, done: RequestDone) -> None:
        """Count a request by its outcome; its sizes and times only if it finished."""
        self.outcomes[done.outcome] += 1
        self._count_reasons(done)
        if done.outcome != "finished":
            return
        if done.first_token_s is None:
            self.prompt_tokens += done.num_prompt_tokens
        self.whole.observe(done.seconds)
        self.request_prompt_tokens.observe(done.num_prompt_tokens)
        cached = sum(prompt.times.cached_tokens for prompt in done.served)
        self.request_computed_tokens.observe(max(0, done.num_prompt_tokens - cached))
        if not done.request.poolings:
            self.preemptions.observe(sum(one.times.num_swaps + one.times.num_rebuilds for one in done.served))
            self.n.observe(done.request.params.n)
            self.max_tokens.observe(done.request.params.max_tokens)
            self.request_output_tokens.observe(done.num_output_tokens)
        self._observe_phases(done)

    def http_request(self, route: str, method: str, status: int) -> None:
        """Count one HTTP request; `route` is one of the app's labels, never a client's path."""
        self.http[route, method, str(status)] += 1

    @property
    def finished_reasons(self) -> dict[str, int]:
        """The number of finished sequences for each reason; 0 for a reason that has not occurred."""
        return {reason: self.reasons[reason] for reason in REASONS}

    def _make_histogram(self, row: MetricRow) -> BucketHistogram:
        shown = (one.buckets for one in (row.pdserve, row.vllm) if one is not None)
        return BucketHistogram(*(self.token_bounds if buckets is None else buckets for buckets in shown))

    def _count_reasons(self, done: RequestDone) -> None:
        """Count finish reasons. Unfinished sequences get their request's outcome; a vector counts as `stop`."""
        for reason in done.reasons:
            self.reasons[reason] += 1
        if done.request.poolings and done.outcome == "finished":
            self.reasons["stop"] += len(done.request.poolings)
        if done.outcome != "finished":
            left = len(done.request.prompts) * done.request.params.num_sequences - len(done.reasons)
            self.reasons["abort" if done.outcome == "cancelled" else "error"] += left

    def _observe_phases(self, done: RequestDone) -> None:
        self.queue.observe(done.queue_s)
        prefill_s, decode_s = done.prefill_s, done.decode_s
        if prefill_s is None or decode_s is None:
            return
        self.prefill.observe(prefill_s)
        self.decode.observe(decode_s)
        self.inference.observe(prefill_s + decode_s)
        if done.num_output_tokens > 1:
            self.mean_between.observe(decode_s / (done.num_output_tokens - 1))
