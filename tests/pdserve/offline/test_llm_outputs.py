"""What LLM's outputs and properties hold besides text: log probabilities, times, tokens."""

import time
from pathlib import Path

import pytest

from pdserve import LLM, FlatLogprobs, SamplingParams
from tests.conformance.served import CHAT, Oracle
from tests.pdserve.offline.conftest import GREEDY, PROMPTS, generated, ids


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


def test_tokenizer_defaults_and_token_counts_are_available(local: LLM, oracle: Oracle) -> None:
    assert local.get_tokenizer().encode(PROMPTS[0]) == oracle.ids(PROMPTS[0])
    assert local.get_default_sampling_params() == SamplingParams()
    before = generated(local)
    local.generate(PROMPTS[0], SamplingParams(temperature=0, ignore_eos=True, max_tokens=5))

    assert generated(local) - before == 5
