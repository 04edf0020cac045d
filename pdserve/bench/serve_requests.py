"""The requests of `pdserve bench serve`, from its data set."""

import itertools
import json
import random
from pathlib import Path

import aiohttp

from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.prompt_files import FilePrompt, read_custom, read_sharegpt
from pdserve.bench.load.random_requests import UNKNOWN_VOCABULARY, make_random_requests
from pdserve.bench.load.session import get_json
from pdserve.bench.serve_options import ServeOptions
from wire.errors import ConfigError, Unavailable

CUSTOM_OUTPUT_LEN = 256
_MIN_TURN, _MAX_PROMPT, _MAX_TURN = 4, 1024, 2048  # vLLM's token limits for ShareGPT turns


async def make_requests(
    options: ServeOptions, http: aiohttp.ClientSession, model: str, folder: str
) -> list[LoadRequest]:
    """Return --num-prompts requests; a file with fewer prompts is repeated. Raises ConfigError, Unavailable."""
    if options.dataset_name == "random":
        return _random(options, folder)
    if options.dataset_name == "custom":
        requests = [_custom(options, one) for one in itertools.islice(read_custom(_path(options)), options.num_prompts)]
    else:
        requests = await _sharegpt(options, http, model)
    if not requests:
        raise ConfigError(f"--dataset-path {options.dataset_path} has no prompt that can be sent")
    return list(itertools.islice(itertools.cycle(requests), options.num_prompts))


def vocabulary(folder: str) -> int:
    """Return the vocabulary size in config.json of `folder`, 1,000 if there is no such local file."""
    try:
        size = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return UNKNOWN_VOCABULARY
    return size if isinstance(size, int) and size > 0 else UNKNOWN_VOCABULARY


def _random(options: ServeOptions, folder: str) -> list[LoadRequest]:
    ids = None if options.backend == "openai-chat" else options.vocab_size or vocabulary(folder)
    return make_random_requests(options.num_prompts, options.shape, random.Random(options.seed), vocabulary=ids)


def _custom(options: ServeOptions, one: FilePrompt) -> LoadRequest:
    given = options.custom_output_len or options.output_len
    return LoadRequest(one.prompt, given or one.output_len or CUSTOM_OUTPUT_LEN)


async def _sharegpt(options: ServeOptions, http: aiohttp.ClientSession, model: str) -> list[LoadRequest]:
    """Return conversations of the file, shuffled, without those whose prompt or answer is too short or too long."""
    given, requests = options.sharegpt_output_len or options.output_len, list[LoadRequest]()
    for one in _shuffled_sharegpt(options):
        if len(requests) == options.num_prompts:
            break
        prompt_len = await _count(http, options.url, model, one.prompt)
        output_len = given or await _count(http, options.url, model, one.answer or "")
        if (
            min(prompt_len, output_len) >= _MIN_TURN
            and prompt_len <= _MAX_PROMPT
            and prompt_len + output_len <= _MAX_TURN
        ):
            requests.append(LoadRequest(one.prompt, output_len))
    return requests


def _shuffled_sharegpt(options: ServeOptions) -> list[FilePrompt]:
    prompts = list(read_sharegpt(_path(options)))
    if not options.disable_shuffle:
        random.Random(options.seed).shuffle(prompts)
    return prompts


async def _count(http: aiohttp.ClientSession, url: str, model: str, text: str) -> int:
    answer = await get_json(http, f"{url}/tokenize", {"model": model, "prompt": text})
    count = answer.get("count") if isinstance(answer, dict) else None
    if not isinstance(count, int):
        raise Unavailable(f"{url}/tokenize returns no token count: use --dataset-name custom")
    return count


def _path(options: ServeOptions) -> Path:
    return Path(options.dataset_path)
