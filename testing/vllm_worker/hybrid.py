"""Models whose layers keep a state (Mamba, GDN) beside the KV of tokens: a state is of all tokens so far.

After _truncate_request_for_prefill and _get_remote_prefill_token_count of vLLM 0.26 and 0.33 (NIXL, Mooncake), and
vllm-ascend 0.23:
prefill   computes the prompt without its last token; vLLM 0.33 computes all of it if `prompt_logprobs` is requested
decode    fetches that state, whichever token it ends with, and computes the last token from it
"""

from testing.vllm_worker.request import FakeBody
from testing.vllm_worker.settings import WorkerSettings


def num_prefilled(settings: WorkerSettings, body: FakeBody, num_tokens: int) -> int:
    """Return how many of a prompt's tokens a prefill leg computes."""
    is_scored = body.params.prompt_logprobs is not None and settings.version >= "0.33"
    return num_tokens - (settings.is_hybrid and num_tokens > 1 and not is_scored)


def num_recomputed(settings: WorkerSettings, num_tokens: int) -> int:
    """Return how many of a prompt's last tokens a decode leg computes itself."""
    return int(settings.is_hybrid and num_tokens > 1)
