"""Flags of vLLM's `bench serve` that have no effect here, or are refused, each with its reason."""

from collections.abc import Mapping, Sequence

from wire.errors import ConfigError

_NO_TOKENIZER = "prompts are made without a tokenizer"
WITHOUT_EFFECT: Mapping[str, tuple[int, str]] = {
    "--request-id-prefix": (1, "requests are distinguished by their connections"),
    "--skip-tokenizer-init": (0, _NO_TOKENIZER),
    "--tokenizer-mode": (1, _NO_TOKENIZER),
    "--trust-remote-code": (0, _NO_TOKENIZER),
}
"""The number of arguments of each flag, and why it has no effect."""
_OTHER_SET = "the data sets are random, custom and sharegpt: convert others to a file for --dataset-name custom"
REFUSED: Mapping[str, str] = {
    "--chat-template-kwargs": "--extra-body '{\"chat_template_kwargs\": {...}}' sends them",
    "--enable-multimodal-chat": "prompts are texts or token ids",
    "--hf-name": _OTHER_SET,
    "--hf-split": _OTHER_SET,
    "--hf-subset": _OTHER_SET,
    "--insecure": "$PDSERVE_CERT_FILE names the certificate to trust",
    "--lora-modules": "adapters are not served",
    "--no-oversample": "set --num-prompts to the number of prompts in the file",
    "--no-stream": "without a stream there is no first token to time",
    "--plot-dataset-stats": "--plot FILE.svg shows requests, tokens per second and latencies",
    "--plot-timeline": "--plot FILE.svg shows requests, tokens per second and latencies",
    "--profile": "`pdserve bench engine` shows where an engine spends its time",
    "--ramp-up-end-rps": "run the benchmark at several values of --request-rate",
    "--ramp-up-start-rps": "run the benchmark at several values of --request-rate",
    "--ramp-up-strategy": "run the benchmark at several values of --request-rate",
    "--random-batch-size": "each request has one prompt",
    "--skip-chat-template": "--backend openai sends prompts without a template, openai-chat uses the server's",
    "--use-beam-search": "beams are not streamed, so there is no first token to time",
}


def settle(argv: Sequence[str]) -> tuple[list[str], str]:
    """Return the arguments without flags that have no effect, and a notice that lists those, "" if there are none.

    Raises ConfigError for a flag that is refused.
    """
    kept, dropped, skipped = list[str](), list[str](), 0
    for word in argv:
        if skipped:
            skipped -= 1
            continue
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")
        if name in REFUSED:
            raise ConfigError(f"{name} is not supported: {REFUSED[name]}")
        if name not in WITHOUT_EFFECT:
            kept.append(word)
            continue
        num_words, why = WITHOUT_EFFECT[name]
        skipped = 0 if equals else num_words
        dropped.append(f"{name} ({why})")
    return kept, f"without effect: {'; '.join(dropped)}" if dropped else ""
