"""The metadata in a result of `pdserve bench serve`, and the file name."""

import re
from datetime import datetime
from typing import Any

from pdserve.bench.serve_options import ServeOptions


def about(options: ServeOptions, model: str, now: datetime) -> dict[str, Any]:
    """Return the metadata of the run with vLLM's keys; --metadata wins."""
    own = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label or None,
        "model_id": model,
        "tokenizer_id": options.tokenizer or model,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if options.request_rate == float("inf") else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "base_url": options.url,
        "seed": options.seed,
    }
    return own | dict(text.split("=", 1) for text in options.metadata)


def file_name(options: ServeOptions, model: str, now: datetime) -> str:
    """Return the name of the result file as in vLLM, with the model's name made safe for a path."""
    if options.result_filename:
        return options.result_filename
    at_most = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    name = re.sub(r"[^\w.-]", "_", model.rsplit("/", 1)[-1])
    label = options.label or options.backend
    return f"{label}-{options.request_rate}qps{at_most}-{name}-{now:%Y%m%d-%H%M%S}.json"
