"""Run lists of prompts on vLLM's CPU build, one at a time. Runs in vLLM's environment and imports none of our code.

    python vllm_offline.py MODEL_DIR DTYPE REPLY_FD

Each line on standard input, [[token ids, output tokens], ...], is answered with {"seconds": ..., "tokens": ...} on
REPLY_FD: those of one call of LLM.generate, greedy, without end of sequence or prefix cache. The first reply,
{"version": ...}, shows that the model is loaded and has run once.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load, then answer until standard input ends."""
    model, dtype, reply_fd = sys.argv[1], sys.argv[2], int(sys.argv[3])
    import vllm

    engine = vllm.LLM(model=model, dtype=dtype, max_model_len=2048, max_num_seqs=256, enable_prefix_caching=False)
    run(engine, [[[100 + at for at in range(32)], 8]] * 2)
    reply(reply_fd, version=vllm.__version__)
    for line in sys.stdin:
        reply(reply_fd, **run(engine, json.loads(line)))


def run(engine: Any, requests: list[Any]) -> dict[str, float]:
    """Return the seconds of these requests, and the number of their output tokens."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
    began = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


def reply(reply_fd: int, **fields: object) -> None:
    """Answer one line."""
    os.write(reply_fd, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    main()
