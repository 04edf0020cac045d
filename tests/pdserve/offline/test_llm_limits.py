"""What LLM refuses or truncates, and how much it runs at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batch.backend import NO_HEADERS, Answer, BatchBackend
from pdserve import LLM, SamplingParams
from tests.conformance.served import CHAT
from tests.pdserve.offline.conftest import ENGINE, GREEDY, PROMPTS, generated, ids


def test_prompt_and_output_stay_within_the_models_length(model: Path) -> None:
    """As in vLLM's tests of generate, with their keywords."""
    keywords = {
        "tokenizer": str(model),
        "gpu_memory_utilization": 0.1,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    with LLM(str(model), max_model_len=40, **keywords, **ENGINE) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True))

    assert {len(output.prompt_token_ids) + len(ids(output)) for output in outputs} == {40}
    assert all(output.metrics is not None for output in outputs)


@pytest.mark.parametrize("prompt", ["x" * 600, [5] * 512, {"prompt_token_ids": [5] * 513}])
def test_a_prompt_that_is_too_long_is_named_before_any_work(local: LLM, prompt: Any) -> None:
    before = generated(local)
    with pytest.raises(ValueError, match=r"prompt 2 has \d+ tokens; the model's maximum context length is 512"):
        local.generate(["a", "b", prompt], GREEDY)

    assert generated(local) == before
    assert len(local.generate([prompt], SamplingParams(truncate_prompt_tokens=8))[0].prompt_token_ids) == 8


def test_a_text_too_long_to_tokenise_is_truncated_on_request(local: LLM) -> None:
    huge = "the quick brown fox " * 10_000
    cut = SamplingParams(truncate_prompt_tokens=8, temperature=0, max_tokens=600, ignore_eos=True)
    (output,) = local.generate(huge, cut)
    (longest,) = local.generate(huge, SamplingParams(truncate_prompt_tokens=-1, temperature=0, max_tokens=5))

    assert len(output.prompt_token_ids) == 8
    assert len(ids(output)) <= 512 - 8
    assert len(longest.prompt_token_ids) == 512 - 5
    assert local.embed(huge, truncate_prompt_tokens=4)[0].outputs.hidden_size == 64
    for refused in (lambda: local.embed(huge), lambda: local.generate(["a", huge])):
        with pytest.raises(ValueError, match=r"prompt [01]: .*maximum context length is 512"):
            refused()


def test_changed_parameters_are_checked_before_any_work(local: LLM) -> None:
    params = SamplingParams()
    params.top_p = 2.0
    with pytest.raises(ValueError, match=r"top_p is 2\.0"):
        local.generate(["a", "b"], [SamplingParams(), params])
    with pytest.raises(TypeError, match="sampling_params holds a value of type dict, but must be SamplingParams"):
        local.generate("a", {"top_p": 0.5})  # type: ignore[arg-type]


def test_a_refusal_of_the_server_names_the_prompt(local: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1: prompt: token id 320 is out of vocabulary: ids are 0\.\.319"):
        local.generate([[5], [320]])
    with pytest.raises(ValueError, match=r"prompt 0: logprobs is 21, but must be in \[0, 20\]"):
        local.generate("a", SamplingParams(logprobs=21))


def test_outputs_end_at_the_models_length(local: LLM) -> None:
    count = 500
    endless = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1000)
    outputs = local.generate(
        [[5] * count] * 2, [endless, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)]
    )

    assert [len(ids(output)) for output in outputs] == [12, 12]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 2


def test_missing_features_are_refused_with_a_reason(local: LLM) -> None:
    for call, words in (
        (lambda: local.sleep(level=1), r"LLM has no sleep: close\(\) frees all memory"),
        (lambda: local.llm_engine.model_config, "LLM has no llm_engine: .* model_config"),
        (lambda: local.renderer, "LLM has no renderer: generate accepts texts and token ids"),
        (lambda: local.model_config.is_encoder_decoder, "model_config has no is_encoder_decoder: hf_config has"),
        (lambda: local.chat(CHAT, chat_template_content_format="openai"), "is for all chats"),
        (lambda: local.generate("a", lora_request=object()), "adapters are not supported"),  # type: ignore[arg-type]
        (lambda: local.encode("a", object()), "pooling_params is not supported: "),  # type: ignore[arg-type]
        (lambda: local.embed("a", tokenization_kwargs={"a": 1}), "else pass token ids"),  # type: ignore[arg-type]
    ):
        with pytest.raises(NotImplementedError, match=words):
            call()
    with pytest.raises(TypeError, match=r"LLM\.chat has no keyword 'documents'"):
        local.chat(CHAT, documents=None)
    assert not hasattr(local, "no_such_name")


class Counting:
    """An `Answerer` that forwards to another and counts the requests at once."""

    def __init__(self, inner: BatchBackend) -> None:
        self._inner, self._now, self.peak = inner, 0, 0

    async def send(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS) -> Answer:
        self._now += 1
        self.peak = max(self.peak, self._now)
        try:
            return await self._inner.send(method, path, body, headers)
        finally:
            self._now -= 1


def test_no_more_than_max_in_flight_requests_run(model: Path) -> None:
    with LLM(str(model), engine="fake", max_in_flight=7) as llm:
        api = llm._thread.value
        counting = api._backend = Counting(api._backend)
        prompts = [[3 + number % 300] * (1 + number % 5) for number in range(500)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))

    assert counting.peak == 7
    assert [output.prompt_token_ids for output in outputs] == prompts
