"""Decide from the arguments of LLM(...) which server to open."""

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.client import own_key
from pdserve.offline.sources import Opened, open_cluster, open_local, open_pair
from scheduler.memory import share_one_arena
from telemetry import logs
from wire.errors import ConfigError

_CLUSTER_IN_FLIGHT = 256
_MIN_IN_FLIGHT = 64
_CLUSTER_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class Opening:
    """How to open the server, the maximum number of requests in flight, and the source of default parameters."""

    open: Callable[[], Opened]
    in_flight: int
    generation_config: str = "vllm"
    override_generation_config: str | None = None


def opening(
    model: str, keywords: Mapping[str, Any], *, cluster: str | None, api_key: str | None, prefill: int | None,
    decode: int | None, max_in_flight: int | None,
) -> Opening:  # fmt: skip
    """Return how to open the server for the arguments. Raises ValueError, TypeError or ConfigError."""
    if max_in_flight is not None and max_in_flight < 1:
        raise ValueError(f"max_in_flight is {max_in_flight}, but must be 1 or more")
    pair = prefill is not None or decode is not None
    if cluster is not None:
        if pair:
            raise ValueError(
                "cluster uses a running cluster, but prefill and decode start one: pass either cluster or these two"
            )
        return _of_cluster(model, keywords, cluster, api_key, max_in_flight)
    if api_key is not None:
        raise ValueError("api_key is for a cluster: a local engine needs none")
    return _of_own(model, keywords, (prefill or 1, decode or 1) if pair else None, max_in_flight)


def _of_cluster(
    model: str, keywords: Mapping[str, Any], url: str, api_key: str | None, max_in_flight: int | None
) -> Opening:
    from pdserve.offline.keywords import without_effect_on_cluster

    if (notice := without_effect_on_cluster(keywords)) is not None:
        print(notice, file=sys.stderr, flush=True)
    key = api_key if api_key is not None else own_key(os.environ)
    in_flight = max_in_flight or _CLUSTER_IN_FLIGHT
    return Opening(
        functools.partial(open_cluster, url, model, key, connections=in_flight, retry_for_s=_CLUSTER_RETRY_S), in_flight
    )


def _of_own(
    model: str, keywords: Mapping[str, Any], pair: tuple[int, int] | None, max_in_flight: int | None
) -> Opening:
    from engine.torch_start import name_backends
    from pdserve.offline.keywords import as_keywords, fill_model, read_keywords

    name_backends()
    options_read = read_keywords(model, keywords)
    if keywords.get("log_level") is not None:  # else keep the script's own logging
        logs.configure(options_read.engine.log_level, log_format=options_read.engine.log_format)
    in_flight = max_in_flight or max(_MIN_IN_FLIGHT, 2 * options_read.engine.max_num_seqs)
    if pair is not None:
        wait_s = options_read.scheduler.startup_timeout
        open_: Callable[[], Opened] = functools.partial(
            open_pair, options_read.arguments, *pair, connections=in_flight, startup_timeout_s=wait_s
        )
    else:
        try:
            open_ = functools.partial(open_local, fill_model(options_read))
            share_one_arena()
        except ConfigError as error:
            raise ConfigError(as_keywords(str(error))) from error
    options = options_read.scheduler
    return Opening(open_, in_flight, options.generation_config, options.override_generation_config)
