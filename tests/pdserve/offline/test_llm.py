"""LLM with an engine in this process; transformers is the oracle."""

import gc
import itertools
import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from batch.backend import NO_HEADERS, Answer, BatchBackend
from pdserve import LLM, BeamSearchParams, FlatLogprobs, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.conformance.served import CHAT, Oracle
from tests.engine.tiny_models import make_tiny_model
from tests.pdserve.offline.conftest import ENGINE

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.mark.covers("A6.80")
def test_greedy_outputs_equal_transformers_in_ids_and_text(local: LLM, oracle: Oracle) -> None:
    outputs = local.generate(PROMPTS, GREEDY)

    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.prompt_token_ids for output in outputs] == [oracle.ids(prompt) for prompt in PROMPTS]
    assert [output.outputs[0].text for output in outputs] == [
        oracle.generate(prompt, max_new_tokens=12)[0] for prompt in PROMPTS
    ]
    for output in outputs:
        assert oracle.tokenizer.decode(ids(output), skip_special_tokens=True) == output.outputs[0].text
        assert (output.outputs[0].finish_reason in ("length", "stop"), output.finished) == (True, True)
        assert (output.prompt_logprobs, output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None,) * 3
    assert len({output.request_id for output in outputs}) == 4


@pytest.mark.covers("A6.79")
def test_outputs_keep_the_order_of_prompts_and_parameters(local: LLM, oracle: Oracle) -> None:
    given: list[Any] = [*PROMPTS, oracle.ids(PROMPTS[0]), {"prompt_token_ids": oracle.ids(PROMPTS[1])}]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (5, 1, 7, 2, 6, 3)]
    outputs = local.generate(given, params, use_tqdm=False)

    expected = [oracle.ids(prompt) for prompt in (*PROMPTS, *PROMPTS[:2])]
    assert [output.prompt_token_ids for output in outputs] == expected
    assert [output.prompt for output in outputs] == [*PROMPTS, None, None]
    assert [len(ids(output)) for output in outputs] == [5, 1, 7, 2, 6, 3]
    assert ids(outputs[4])[:5] == ids(outputs[0])
    assert ids(local.generate(oracle.ids(PROMPTS[2]), GREEDY)[0])[:7] == ids(outputs[2])
    assert local.generate([]) == []
    with pytest.raises(ValueError, match="2 prompts and 1 sets of parameters"):
        local.generate(PROMPTS[:2], [GREEDY])


def test_priorities_are_one_for_all_or_one_each(local: LLM) -> None:
    """As in vLLM's tests of generate."""
    for priority in (None, 1, [0] * 4):
        assert len(local.generate(PROMPTS, GREEDY, priority=priority)) == 4
    for one in (1, [0]):
        assert len(local.generate(PROMPTS[0], None, priority=one)) == 1
    for wrong in ([0] * 3, []):
        with pytest.raises(ValueError, match=f"4 prompts and {len(wrong)} priorities"):
            local.generate(PROMPTS, priority=wrong)


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


@pytest.mark.parametrize(
    ("kind", "value", "fits"),
    [
        (
            "json",
            {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
            r'\{\s*"a"\s*:\s*[12].*',
        ),
        ("regex", r"(25[0-5]|1\d)\.7", r"(25[0-5]|1\d)\.7"),
        ("choice", ["Python", "Rust"], "Python|Rust"),
        ("grammar", 'root ::= "SELECT " col\ncol ::= "a" | "b"\n', "SELECT [ab]"),
        ("grammar", 'start: "SELECT " col\ncol: "a" | "b"\n', "SELECT [ab]"),
    ],
)
def test_each_structure_is_followed_whatever_backend_is_named(local: LLM, kind: str, value: Any, fits: str) -> None:
    """As in vLLM's structured_output tests."""
    structure = StructuredOutputsParams(**{kind: value}, backend="guidance", disable_additional_properties=True)
    (output,) = local.generate(PROMPTS[0], SamplingParams(max_tokens=60, seed=1, structured_outputs=structure))

    assert re.match(fits, output.outputs[0].text)


def with_markers(folder: Path) -> Path:
    """Give a model's tokenizer <think> and </think> in place of its last two tokens."""
    file = make_tiny_model("llama", folder) / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    for token in sorted(vocabulary, key=vocabulary.__getitem__)[-2:]:
        del vocabulary[token]
    content["model"]["merges"] = merges[:-2]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(file))
    return folder


def test_thinking_has_a_budget_and_stays_in_the_text(tmp_path: Path) -> None:
    folder = with_markers(tmp_path / "model")
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("</think>")
    assert end is not None, "with_markers added it"
    budget = SamplingParams(max_tokens=30, seed=1, thinking_token_budget=3, ignore_eos=True)
    form = StructuredOutputsParams(regex="[ab]{3}")
    with LLM(str(folder), reasoning_parser="qwen3", **ENGINE) as llm:  # type: ignore[arg-type]
        (chat,) = llm.chat(CHAT, budget)
        (formed,) = llm.chat(CHAT, SamplingParams(max_tokens=30, seed=1, thinking_token_budget=3,
                                                  structured_outputs=form))  # fmt: skip
        (begun,) = llm.generate("Hello <think>", budget)
        (free,) = llm.generate("Hello", budget)

    assert [ids(one)[:4].count(end) for one in (chat, formed, begun)] == [1, 1, 1]
    assert chat.outputs[0].text.count("</think>") >= 1
    assert re.fullmatch(r"[ab]{3}", formed.outputs[0].text.partition("</think>")[2])
    assert end not in ids(free)[:4]


def test_positional_arguments_are_vllms(local: LLM) -> None:
    """As in vLLM 0.32: generate takes two, chat and beam_search continue with a bar and an adapter."""
    (answer,) = local.chat(CHAT, GREEDY, False, None, 3)
    (named,) = local.chat(CHAT, GREEDY, use_tqdm=False, priority=3)
    (beams,) = local.beam_search(PROMPTS[0], BeamSearchParams(2, 4), None, False)

    assert (ids(answer), answer.lora_request) == (ids(named), None)
    assert len(beams.sequences) == 2
    with pytest.raises(NotImplementedError, match="lora_request is not supported"):
        local.chat(CHAT, GREEDY, False, "an adapter")  # type: ignore[arg-type]


def test_log_probabilities_are_the_log_softmax_by_token_id_with_ranks(local: LLM, oracle: Oracle) -> None:
    (output,) = local.generate(PROMPTS[0], SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2, seed=3))
    found, prompt = output.outputs[0], output.prompt_token_ids
    table = oracle.logprobs([*prompt, *found.token_ids])

    assert found.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    reported = [one for one in (*output.prompt_logprobs[1:], *found.logprobs) if one is not None]
    assert len(reported) == len(prompt) + len(found.token_ids) - 1
    for row, token_id, one in zip(table, [*prompt, *found.token_ids][1:], reported, strict=False):
        assert token_id in one
        assert one[token_id].rank == int((row > row[token_id]).sum()) + 1
        for other, entry in one.items():
            assert entry.logprob == pytest.approx(row[other].item(), abs=1e-4)
            assert entry.decoded_token == oracle.tokenizer.decode([other])
    assert [len(one) in (3, 4) for one in found.logprobs] == [True] * 6
    chosen = [one[token_id].logprob for token_id, one in zip(found.token_ids, found.logprobs, strict=True)]
    assert found.cumulative_logprob == pytest.approx(sum(chosen))


def test_a_prompt_may_have_several_outputs_and_seeds_repeat_them(local: LLM) -> None:
    drawn = SamplingParams(n=3, temperature=1.0, max_tokens=10, seed=11)
    first, again = local.generate([PROMPTS[0]] * 2, drawn)

    assert [one.index for one in first.outputs] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in first.outputs}) == 3
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in first.outputs]
    free = local.generate([PROMPTS[0]] * 2, SamplingParams(max_tokens=10))
    assert ids(free[0]) != ids(free[1])


def test_a_chat_gives_the_servers_answer_and_the_rendered_prompt(local: LLM, oracle: Oracle) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    alone = local.chat(CHAT, GREEDY)
    several = local.chat([CHAT, CHAT], GREEDY, chat_template=template)

    rendered = oracle.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert [output.prompt for output in alone] == [rendered]
    assert alone[0].outputs[0].text == oracle.generate(rendered, max_new_tokens=12)[0]
    assert [output.prompt for output in several] == [CHAT[0]["content"]] * 2
    assert several[0].outputs == several[1].outputs
    with pytest.raises(ValueError, match=r"prompt 0: tools\.0\.function is not an object"):
        local.chat(CHAT, tools=[{"type": "function"}])
    with pytest.raises(ValueError, match="prompt 0: continue_final_message and add_generation_prompt"):
        local.chat(CHAT, continue_final_message=True)


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
    with pytest.raises(TypeError, match="sampling_params holds a dict, must be SamplingParams"):
        local.generate("a", {"top_p": 0.5})  # type: ignore[arg-type]


def test_a_refusal_of_the_server_names_the_prompt(local: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1: prompt: token id 320 is out of vocabulary: ids are 0\.\.319"):
        local.generate([[5], [320]])
    with pytest.raises(ValueError, match=r"prompt 0: logprobs is 21, must be in \[0, 20\]"):
        local.generate("a", SamplingParams(logprobs=21))


def test_outputs_end_at_the_models_length(local: LLM) -> None:
    count = 500
    endless = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1000)
    outputs = local.generate(
        [[5] * count] * 2, [endless, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)]
    )

    assert [len(ids(output)) for output in outputs] == [12, 12]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 2


def test_fields_reach_the_engine(local: LLM) -> None:
    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["fox", "dog"]))
    banned = SamplingParams(temperature=0, max_tokens=4, logit_bias={7: 100.0})
    stopped = SamplingParams(temperature=0, max_tokens=4, stop_token_ids=[7], logit_bias={7: 100.0})
    silent = SamplingParams(temperature=0, max_tokens=3, detokenize=False)
    outputs = local.generate([PROMPTS[0]] * 4, [choice, banned, stopped, silent])

    assert outputs[0].outputs[0].text in ("fox", "dog")
    assert ids(outputs[1]) == [7] * 4
    assert (outputs[2].outputs[0].finish_reason, outputs[2].outputs[0].stop_reason) == ("stop", 7)
    assert (outputs[3].outputs[0].text, len(ids(outputs[3]))) == ("", 3)


def test_beam_search_equals_transformers_with_logprobs(local: LLM, oracle: Oracle) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (found,) = local.beam_search(PROMPTS[0], params)
    (greedy,) = local.beam_search([{"prompt": PROMPTS[0]}], BeamSearchParams(beam_width=1, max_tokens=6))

    prompt = oracle.ids(PROMPTS[0])
    expected = oracle.generate(PROMPTS[0], num_beams=3, num_return_sequences=3, max_new_tokens=6)
    assert [oracle.tokenizer.decode(one.tokens[len(prompt) :]) for one in found.sequences] == expected
    for one in found.sequences:
        table, written = oracle.logprobs(one.tokens), one.tokens[len(prompt) :]
        likely = [table[len(prompt) + at - 1][token_id].item() for at, token_id in enumerate(written)]
        assert one.cum_logprob == pytest.approx(sum(likely), abs=1e-3)
        assert one.text == oracle.tokenizer.decode(one.tokens)
    assert [one.cum_logprob for one in found.sequences] == sorted(
        (one.cum_logprob for one in found.sequences), reverse=True
    )
    assert greedy.sequences[0].tokens[len(prompt) :] == ids(local.generate(PROMPTS[0], GREEDY)[0])[:6]


def test_vectors_have_length_1_and_scores_are_their_cosines(local: LLM) -> None:
    texts = ["hello", "the quick brown fox", "hello"]
    made = [one.outputs.embedding for one in local.embed(texts)]
    many = local.score("hello", ["hello"] * 40 + ["the quick brown fox"])
    pairs = local.score(texts, texts[::-1])

    assert [math.fsum(value * value for value in vector) for vector in made] == pytest.approx([1.0] * 3, abs=1e-5)
    assert [one.outputs.data for one in local.encode(texts)] == made
    cosines = [math.fsum(itertools.starmap(float.__mul__, zip(made[0], other, strict=True))) for other in made]
    assert [one.outputs.score for one in many] == pytest.approx([1.0] * 40 + [cosines[1]], abs=1e-5)
    assert [one.outputs.score for one in pairs] == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    assert local.embed("hello", dimensions=8)[0].outputs.hidden_size == 8
    with pytest.raises(ValueError, match="2 texts against 3"):
        local.score(texts[:2], texts)


def test_missing_features_are_refused_with_a_reason(local: LLM) -> None:
    for call, words in (
        (lambda: local.classify("a"), "LLM has no classify: models of one class score pairs"),
        (lambda: local.reward("a"), "LLM has no reward: reward models are not supported"),
        (lambda: local.sleep(level=1), r"LLM has no sleep: close\(\) frees all memory"),
        (lambda: local.llm_engine.model_config, "LLM has no llm_engine: .* model_config"),
        (lambda: local.renderer, "LLM has no renderer: generate accepts texts and token ids"),
        (lambda: local.model_config.is_encoder_decoder, "model_config has no is_encoder_decoder: hf_config has"),
        (lambda: local.chat(CHAT, chat_template_content_format="openai"), "is for all chats"),
        (lambda: local.encode("a", pooling_task="token_embed"), "'token_embed' is not supported"),
        (lambda: local.generate("a", lora_request=object()), "adapters are not supported"),  # type: ignore[arg-type]
        (lambda: local.encode("a", object()), "pooling_params is not supported: "),  # type: ignore[arg-type]
        (lambda: local.embed("a", tokenization_kwargs={"a": 1}), "else pass token ids"),  # type: ignore[arg-type]
    ):
        with pytest.raises(NotImplementedError, match=words):
            call()
    with pytest.raises(TypeError, match=r"LLM\.chat has no keyword 'documents'"):
        local.chat(CHAT, documents=None)
    assert not hasattr(local, "no_such_name")


def test_metrics_have_the_times_of_each_request(local: LLM) -> None:
    began, begin = time.time(), time.monotonic()
    outputs = [*local.generate(PROMPTS[:2], SamplingParams(max_tokens=4, ignore_eos=True)), *local.chat(CHAT, GREEDY)]
    end, ended = time.monotonic(), time.time()

    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        assert metrics.num_generation_tokens == len(ids(output))
        assert began <= metrics.arrival_time <= ended
        times = (begin, metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts, end)
        assert list(times) == sorted(times)
        assert 0 < metrics.first_token_latency == pytest.approx(metrics.first_token_ts - metrics.queued_ts)


def test_flat_logprobs_have_the_same_values_in_flat_lists(local: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    flat_params = params.clone()
    flat_params.flat_logprobs = True
    plain, flat = local.generate(PROMPTS[:1] * 2, [params, flat_params])

    found, expected = flat.outputs[0].logprobs, plain.outputs[0].logprobs
    assert isinstance(found, FlatLogprobs)
    assert repr(found) == f"FlatLogprobs({len(found)} positions, {len(found.token_ids)} entries)"
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert expected is not None
    assert (list(found), found[-1], list(found[1:3])) == (expected, expected[-1], expected[1:3])
    assert flat.prompt_logprobs[0] == {}
    assert list(flat.prompt_logprobs)[1:] == (plain.prompt_logprobs or [])[1:]
    assert found.token_ids[: found.end_indices[0]] == list(expected[0])
    assert len(found.token_ids) == len(found.logprobs) == len(found.ranks) == len(found.decoded_tokens)
    assert flat.outputs[0].cumulative_logprob == plain.outputs[0].cumulative_logprob


def test_attributes_of_parameters_and_outputs_can_be_set(local: LLM) -> None:
    params = local.get_default_sampling_params()
    params.max_tokens, params.temperature, params.top_k = 3, 0.0, 5
    (output,) = local.generate(PROMPTS[0], params)
    output.prompt = "another"
    output.label = "mine"  # type: ignore[attr-defined]
    output.outputs[0].text += "!"

    assert (output.prompt, output.outputs[0].text[-1], len(ids(output))) == ("another", "!", 3)
    assert (output.encoder_prompt, output.kv_transfer_params, output.outputs[0].lora_request) == (None, None, None)


def test_the_models_config_is_that_of_its_folder(local: LLM, model: Path) -> None:
    config = local.model_config

    assert (config.model, config.tokenizer, config.max_model_len) == (str(model), str(model), 512)
    assert (config.get_vocab_size(), config.hf_config.model_type) == (320, "llama")


def test_a_reset_prefix_cache_is_not_found_again(local: LLM) -> None:
    prompt = [7] * 100
    first, again = (local.generate([prompt], GREEDY)[0] for _ in range(2))
    chat, chatted = (local.chat(CHAT * 20, GREEDY)[0] for _ in range(2))
    assert local.reset_prefix_cache()
    fresh, warm = (local.generate([prompt], GREEDY)[0] for _ in range(2))

    assert [again.num_cached_tokens, fresh.num_cached_tokens, warm.num_cached_tokens] == [96, 0, 96]
    assert local.chat(CHAT * 20, GREEDY)[0].num_cached_tokens == 0 < (chatted.num_cached_tokens or 0)
    assert ids(first) == ids(fresh)
    assert ids(chat) == ids(chatted)


def test_a_custom_tokenizer_reads_prompts_and_writes_texts(model: Path, local: LLM) -> None:
    class Shouting:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def encode(self, text: str) -> list[int]:
            return list(self.inner.encode(text.lower()))

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return str(self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)).upper()

    with LLM(str(model), **ENGINE) as llm:  # type: ignore[arg-type]
        own = Shouting(llm.get_tokenizer())
        llm.set_tokenizer(own)
        (output,) = llm.generate("THE QUICK BROWN FOX", GREEDY)
        with pytest.raises(ValueError, match="stop strings need the model's own tokenizer"):
            llm.generate("a", SamplingParams(stop="b"))
        assert llm.get_tokenizer() is own

    (plain,) = local.generate("the quick brown fox", GREEDY)
    assert (ids(output), output.prompt) == (ids(plain), "THE QUICK BROWN FOX")
    assert output.outputs[0].text == plain.outputs[0].text.upper()


def test_vllms_keywords_with_neutral_values_are_accepted(local: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)

    plain = local.generate("hello", params)[0].outputs[0].token_ids
    reported = local.generate("hello", params, lora_request=None, tokenization_kwargs=None, mm_processor_kwargs=None)
    assert reported[0].outputs[0].token_ids == plain


def test_tokenizer_defaults_and_token_counts_are_available(local: LLM, oracle: Oracle) -> None:
    assert local.get_tokenizer().encode(PROMPTS[0]) == oracle.ids(PROMPTS[0])
    assert local.get_default_sampling_params() == SamplingParams()
    before = generated(local)
    local.generate(PROMPTS[0], SamplingParams(temperature=0, ignore_eos=True, max_tokens=5))

    assert generated(local) - before == 5


def generated(llm: LLM) -> float:
    """The number of tokens that an LLM has generated."""
    return sum(getattr(one, "value", 0) for one in llm.get_metrics() if one.name == "vllm:generation_tokens_total")


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


def test_an_unreferenced_llm_ends_its_thread(model: Path) -> None:
    llm = LLM(str(model), engine="fake")
    thread = llm._thread._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(300)

    assert not thread.is_alive()


def test_an_llms_seed_repeats_a_script_and_differs_per_prompt(model: Path) -> None:
    made = []
    for _ in range(2):
        with LLM(str(model), generation_config="auto", **ENGINE) as llm:  # type: ignore[arg-type]
            made.append([ids(output) for output in llm.generate([PROMPTS[0]] * 3)])
    with LLM(str(model), seed=5, **ENGINE) as other:  # type: ignore[arg-type]
        made.append([ids(output) for output in other.generate([PROMPTS[0]] * 3)])

    assert made[0] == made[1]
    assert len({tuple(one) for one in (*made[0], *made[2])}) == 6
