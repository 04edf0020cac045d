"""Bucket boundaries of the histograms: pdserve's, and vLLM's, so that one query can sum the metrics of both."""

from collections.abc import Iterator, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
HOP_SECONDS = (0.0005, 0.001, 0.0025, *SECONDS)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BYTES = tuple(4**power * 1024 for power in range(13))
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)

VLLM_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
VLLM_STEP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
VLLM_N = (1, 2, 5, 10, 20)
VLLM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

DEFAULT_MODEL_LEN = 131072


def vllm_tokens(max_model_len: int) -> Sequence[int]:
    """Return 1, 2, 5, 10, 20 ... up to `max_model_len`: vLLM's bucket boundaries for token counts."""
    return tuple(_one_two_five(max_model_len))


def _one_two_five(maximum: int) -> Iterator[int]:
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > maximum:
                return
            yield digit * power
        power *= 10
