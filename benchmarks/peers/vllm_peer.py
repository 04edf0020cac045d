"""Run loads on vLLM's CPU build, one at a time. Runs in vLLM's environment and imports none of our code.

    python vllm_peer.py MODEL_DIR DTYPE REPLY_FD

Each line on standard input, {"requests": 8, "prompt": 256, "out": 64}, is answered with {"seconds": ...} on REPLY_FD.
Prompts are random token ids, greedy, without end of sequence or prefix cache. The first reply, {"version": ...}, shows
that the model is loaded and has run once.
"""

import json
import os
import random
import sys
import time
from typing import Any

_FIRST_ID, _LAST_ID = 100, 40_000


def main() -> None:
    """Load, then answer until standard input ends."""
    model, dtype, reply_fd = sys.argv[1], sys.argv[2], int(sys.argv[3])
    import vllm

    limits = {"max_model_len": 2048, "max_num_seqs": 64, "gpu_memory_utilization": 0.5}  # ours runs on the same card
    engine = vllm.LLM(model=model, dtype=dtype, enable_prefix_caching=False, **limits)
    numbers = random.Random(0)
    seconds_of(engine, numbers, requests=2, prompt=32, out=8)
    reply(reply_fd, version=vllm.__version__)
    for line in sys.stdin:
        reply(reply_fd, seconds=seconds_of(engine, numbers, **json.loads(line)))


def seconds_of(engine: Any, numbers: random.Random, *, requests: int, prompt: int, out: int) -> float:
    """Return the seconds that `requests` prompts take to finish."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": numbers.choices(range(_FIRST_ID, _LAST_ID), k=prompt)} for _ in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
    began = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert made == requests * out, f"{made} tokens instead of {requests * out}"
    return took


def reply(reply_fd: int, **fields: object) -> None:
    """Answer one line."""
    os.write(reply_fd, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    main()
