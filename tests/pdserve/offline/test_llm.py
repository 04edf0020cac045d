"""LLM with an engine in this process; transformers is the oracle."""

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pdserve import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tests.conformance.served import CHAT, Oracle
from tests.engine.tiny_models import make_tiny_model
from tests.pdserve.offline.conftest import ENGINE, GREEDY, PROMPTS, ids


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
    with pytest.raises(ValueError, match="the number of sets of parameters is 1, but the number of prompts is 2"):
        local.generate(PROMPTS[:2], [GREEDY])


def test_priorities_are_one_for_all_or_one_each(local: LLM) -> None:
    """As in vLLM's tests of generate."""
    for priority in (None, 1, [0] * 4):
        assert len(local.generate(PROMPTS, GREEDY, priority=priority)) == 4
    for one in (1, [0]):
        assert len(local.generate(PROMPTS[0], None, priority=one)) == 1
    for wrong in ([0] * 3, []):
        with pytest.raises(ValueError, match=f"priorities is {len(wrong)}, but the number of prompts is 4"):
            local.generate(PROMPTS, priority=wrong)


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


@pytest.mark.covers("B.reasoning.4")
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


@pytest.mark.covers("B.tools.1")
def test_tools_calls_and_results_reach_the_template(local: LLM) -> None:
    function = {"name": "now", "parameters": {"type": "object"}}
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    turns = [
        *CHAT,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    template = "{{ [tools[0].function.name, messages[-2].tool_calls[0].function.arguments, messages[-1]] | tojson }}"
    (output,) = local.chat(
        turns, GREEDY, tools=[{"type": "function", "function": function}], chat_template=template
    )  # fmt: skip

    assert json.loads(output.prompt or "") == ["now", {"zone": "UTC"}, turns[-1]]


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
