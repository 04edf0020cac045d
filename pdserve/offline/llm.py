"""`LLM`: texts, chats, vectors and scores in a Python script, from a local engine or a cluster."""

import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar

from engine.torch_start import only_meanwhile
from pdserve.offline import beam_search as beams
from pdserve.offline import vectors
from pdserve.offline.engine_args import EngineArgs
from pdserve.offline.generating import Job, generate, seed_of
from pdserve.offline.http_api import HttpApi
from pdserve.offline.images import with_data_urls
from pdserve.offline.loop_thread import LoopThread
from pdserve.offline.metrics import Metric, read_metrics
from pdserve.offline.model_config import ModelConfig
from pdserve.offline.opening import opening
from pdserve.offline.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pdserve.offline.progress import ProgressBar, UseTqdm
from pdserve.offline.prompts import Prompts, conversations, one_each, read_prompts
from pdserve.offline.sampling_params import BeamSearchParams, SamplingParams
from pdserve.offline.tokenizer import SetTokenizer, load_tokenizer
from pdserve.offline.unsupported import MEMBERS, refuse
from pdserve.offline.user_errors import hide_internal_frames
from scheduler.memory import release_free

R = TypeVar("R")
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """One model, used from a script. Owns the thread that runs its engine or its client.

        LLM("facebook/opt-125m")                                  an engine in this process
        LLM("facebook/opt-125m", prefill=1, decode=1)             a prefill and a decode instance, as child processes
        LLM("facebook/opt-125m", cluster="http://host:9000")      a running cluster

    `model` is a folder or a hub name, empty for the default model; with a cluster it is a served name. Other
    keywords are flags of `pdserve serve` or of vLLM, with underscores: those without effect are listed once on stderr,
    unknown ones raise TypeError. A script samples the same outputs in every run, unless `seed` is changed;
    `seed=None` draws random seeds. `api_key` is for a cluster (default: $PDSERVE_API_KEY), and so is `tokenizer`, which
    get_tokenizer loads; `max_in_flight` is the maximum number of concurrent requests.

    Close the LLM, or use it as a context manager; it closes itself when the script exits.
    """

    @hide_internal_frames
    def __init__(
        self, model: str = "", *, tokenizer: str | None = None, seed: int | None = 0, cluster: str | None = None,
        api_key: str | None = None, prefill: int | None = None, decode: int | None = None,
        max_in_flight: int | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        """Load the model, or connect to it. Raises ConfigError for wrong input, Unavailable for no response."""
        if tokenizer is not None and cluster is None:
            keywords["tokenizer"] = tokenizer
        with only_meanwhile():
            self._opening = opening(
                str(model), keywords, cluster=cluster, api_key=api_key, prefill=prefill, decode=decode,
                max_in_flight=max_in_flight,
            )  # fmt: skip
            self._tokenizer, self._seed, self._numbers = tokenizer, seed, _Numbers()
            self._set_tokenizer: SetTokenizer | None = None
            self._cache_salt: str | None = None
            self._thread: LoopThread[HttpApi] = LoopThread(self._opening.open)
        self._close = weakref.finalize(self, _close, self._thread)  # at interpreter exit too

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an LLM with these keywords. Raises as LLM(...) does."""
        return cls(**engine_args.keywords())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what LLM started: threads, the engine, processes. Idempotent."""
        self._close()

    def __getattr__(self, name: str) -> NoReturn:
        """Raises NotImplementedError with the reason for members of vLLM's class, AttributeError for others."""
        if name in MEMBERS:
            raise NotImplementedError(f"LLM has no {name}: {MEMBERS[name]}")
        raise AttributeError(f"LLM has no {name}", name=name, obj=self)

    @hide_internal_frames
    def generate(
        self, prompts: Prompts | None = None, sampling_params: Params = None, *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None, use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None, **others: None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Continue each prompt, with one set of parameters or one each; return the outputs in prompt order.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; a text with placeholders
        may have {"multi_modal_data": {"image": PIL image, or a list}}. Before
        anything is computed, raises ValueError with the number of a prompt that is wrong or too long.
        """
        refuse("generate", others)
        given = read_prompts(prompt_token_ids if prompts is None else prompts, takes_images=True)
        return self._generate(given, sampling_params, priority, use_tqdm)

    @hide_internal_frames
    def chat(
        self, messages: Sequence[Any], sampling_params: Params = None, use_tqdm: UseTqdm = True,
        lora_request: None = None, priority: int | Sequence[int] | None = None, chat_template: str | None = None,
        chat_template_content_format: str = "auto", add_generation_prompt: bool = True,
        continue_final_message: bool = False, tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None, **others: None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one conversation or several, like /v1/chat/completions."""
        refuse("chat", {"lora_request": lora_request, **others})
        if chat_template_content_format != "auto":
            raise NotImplementedError("chat_template_content_format is for all chats: pass it to LLM(...)")
        options = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
            "chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs,
            **({"tools": list(tools), "tool_choice": "none"} if tools else {}),
        }  # fmt: skip
        fields = {name: value for name, value in options.items() if value is not None}
        chats = [{"messages": with_data_urls(one), **fields} for one in conversations(messages)]
        return self._generate(chats, sampling_params, priority, use_tqdm)

    @hide_internal_frames
    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams | Sequence[BeamSearchParams], lora_request: None = None,
        use_tqdm: UseTqdm = False, **others: None,
    ) -> list[BeamSearchOutput]:  # fmt: skip
        """Return the likeliest outputs of each prompt, best first. Raises ValueError with a wrong prompt's number."""
        refuse("beam_search", {"lora_request": lora_request, **others})
        given = read_prompts(prompts)
        wanted = one_each(params, len(given), None, "sets of parameters")
        for one in wanted:
            _check_kind(one, BeamSearchParams, "params")
        with ProgressBar(len(given), use_tqdm) as progress:
            return self._run(
                lambda api, limit: beams.beam_search(api, given, wanted, limit, progress)  # type: ignore[arg-type]
            )

    @hide_internal_frames
    def embed(
        self, prompts: Prompts, *, use_tqdm: UseTqdm = True, dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None, **others: None,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """Return a vector of norm 1 for each prompt."""
        refuse("embed", others)
        given = read_prompts(prompts)
        options = _without_none(dimensions=dimensions, truncate_prompt_tokens=truncate_prompt_tokens)
        with ProgressBar(len(given), use_tqdm) as progress:
            return self._run(lambda api, limit: vectors.embed(api, given, options, limit, progress))

    @hide_internal_frames
    def encode(
        self, prompts: Prompts, pooling_params: None = None, *, pooling_task: str | None = None,
        use_tqdm: UseTqdm = True, truncate_prompt_tokens: int | None = None, dimensions: int | None = None,
        use_activation: bool | None = None, **others: None,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """Return the output of the model's pooler for each prompt, with the tasks of /pooling."""
        refuse("encode", {"pooling_params": pooling_params, **others})
        options = _without_none(
            task=None if pooling_task == "encode" else pooling_task, truncate_prompt_tokens=truncate_prompt_tokens,
            dimensions=dimensions, use_activation=use_activation,
        )  # fmt: skip
        return [
            PoolingRequestOutput(one.request_id, PoolingOutput(one.entry["data"]), one.token_ids)
            for one in self._read("/pooling", prompts, options, use_tqdm)
        ]

    @hide_internal_frames
    def classify(
        self, prompts: Prompts, *, use_tqdm: UseTqdm = True, use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None, **others: None,
    ) -> list[ClassificationRequestOutput]:  # fmt: skip
        """Return the probability of each class for each prompt; the logits with `use_activation=False`."""
        refuse("classify", others)
        options = _without_none(use_activation=use_activation, truncate_prompt_tokens=truncate_prompt_tokens)
        return [
            ClassificationRequestOutput(one.request_id, ClassificationOutput(one.entry["probs"]), one.token_ids)
            for one in self._read("/classify", prompts, options, use_tqdm)
        ]

    @hide_internal_frames
    def reward(
        self, prompts: Prompts, pooling_params: None = None, *, use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None, **others: None,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """Return the logits of a reward model for each prompt: its head without an activation."""
        refuse("reward", {"pooling_params": pooling_params, **others})
        return self.encode(
            prompts, pooling_task="classify", use_tqdm=use_tqdm, truncate_prompt_tokens=truncate_prompt_tokens,
            use_activation=False,
        )  # fmt: skip

    @hide_internal_frames
    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None, **others: None,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """Return the similarity of texts: one text against each of the others, or pair by pair."""
        refuse("score", others)
        pairs = vectors.Pairs.read(data_1, data_2)
        options = _without_none(truncate_prompt_tokens=truncate_prompt_tokens)
        with ProgressBar(len(pairs.right), use_tqdm) as progress:
            return self._run(lambda api, limit: vectors.score(api, pairs, options, limit, progress))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Make later texts and chats of this LLM ignore everything cached so far; return True.

        They get a new salt, so that other clients of a cluster keep their cache; old blocks are evicted as needed.
        """
        self._cache_salt = secrets.token_hex(8)
        return True

    @property
    def model_config(self) -> ModelConfig:
        """The known part of the model's configuration."""
        api = self._thread.value
        return ModelConfig(api.root, api.model, self._tokenizer or api.root, api.max_model_len, self._seed)

    @hide_internal_frames
    def get_tokenizer(self) -> Any:
        """Return the tokenizer that was set, else the model's, loaded by transformers from a local folder."""
        if self._set_tokenizer is not None:
            return self._set_tokenizer.tokenizer
        return load_tokenizer(self._tokenizer, self._thread.value.root)

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use `tokenizer` from now on to encode generate's texts, and to decode the outputs of generate and chat."""
        self._set_tokenizer = SetTokenizer(tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that `generate` uses by default: vLLM's, or those of generation_config."""
        from scheduler.model.generation_defaults import read_defaults

        source, override = self._opening.generation_config, self._opening.override_generation_config
        found = read_defaults(self._thread.value.root, source, override)
        return SamplingParams(**{**found, "top_k": max(found["top_k"], 0)})

    @hide_internal_frames
    def get_metrics(self) -> list[Metric]:
        """Return the server's metrics from /metrics."""
        return read_metrics(self._run(lambda api, limit: api.get_text("/metrics")))

    def _generate(
        self, prompts: Sequence[Any], params: Params, priority: int | Sequence[int] | None, use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        own = one_each(params, len(prompts), self.get_default_sampling_params(), "sets of parameters")
        for one in own:
            _check_params(one)
        order = one_each(priority, len(prompts), 0, "priorities")
        if self._set_tokenizer is not None:
            prompts = self._set_tokenizer.encoded(prompts, own)
        first = self._numbers.take(len(prompts))
        jobs = [
            Job(index, prompt, one, urgency, seed_of(one, self._seed, first + index), self._cache_salt)
            for index, (prompt, one, urgency) in enumerate(zip(prompts, own, order, strict=True))
        ]
        with ProgressBar(len(jobs), use_tqdm) as progress:
            outputs = self._run(lambda api, limit: generate(api, jobs, limit, progress))
        if self._set_tokenizer is not None:
            self._set_tokenizer.decode(outputs, own)
        return outputs

    def _read(
        self, path: str, prompts: Prompts, options: Mapping[str, Any], use_tqdm: UseTqdm
    ) -> list[vectors.PooledText]:
        given = read_prompts(prompts)
        with ProgressBar(len(given), use_tqdm) as progress:
            return self._run(lambda api, limit: vectors.read_texts(api, path, given, options, limit, progress))

    def _run(self, work: Callable[[HttpApi, int], Coroutine[Any, Any, R]]) -> R:
        return self._thread.run(work(self._thread.value, self._opening.in_flight))


def _close(thread: LoopThread[HttpApi]) -> None:
    """Close the thread, and return the C library's freed memory to the system, to avoid fragmentation."""
    thread.close()
    if not sys.is_finalizing():
        release_free()


class _Numbers:
    """Numbers the prompts of one LLM across threads."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), 0

    def take(self, count: int) -> int:
        """Return the first of the next `count` numbers."""
        with self._lock:
            first, self._next = self._next, self._next + count
            return first


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_params(params: Any) -> None:
    """Check the parameters again: they may have been changed since their creation."""
    _check_kind(params, SamplingParams, "sampling_params")
    params.check()


def _check_kind(params: Any, kind: type[Any], name: str) -> None:
    if not isinstance(params, kind):
        raise TypeError(f"{name} holds a value of type {type(params).__name__}, but must be {kind.__name__}")
