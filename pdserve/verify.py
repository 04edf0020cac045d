"""`pdserve verify`: run prompts through P/D, combined and transformers, and compare the outputs token for token."""

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from devices.table import AUTO
from flags.options import EngineOptions, add_flags, flag, from_namespace
from kvtransfer.transport_table import NAMES, default_names
from pdserve import model
from pdserve.engine_flags import refuse_missing
from pdserve.flags.parser import CommandParser
from pdserve.termination import unwind_on_sigterm
from pdserve.verify_compare import Outputs, all_divergences, first_divergence
from pdserve.verify_devices import DeviceKindPair, DevicePairs, choose_pairs
from pdserve.verify_prompts import make_prompts
from pdserve.verify_runs import MORE_TOKENS, VerifyOutputs, through_combined, through_pd
from pdserve.verify_transports import EACH, Chosen, choose
from pdserve.work_folder import work_folder
from scheduler.model.files import read_model_files
from telemetry import logs
from wire.errors import ConfigError

if TYPE_CHECKING:
    from engine.oracle import Oracle

REFERENCE = "transformers"
_FEATURE_ROOM = 64  # tokens of the longest structured output
EPILOG = """\
examples:
  pdserve verify                                   the default model in float32, over each available transport
  pdserve verify --model ~/models/Qwen3-0.6B --transport tcp --prompts 4 --max-tokens 16
  pdserve verify --device cpu:cuda --transport tcp  P on the CPU, D on a GPU
  pdserve verify --dtype bfloat16                  reports where tokens diverge and the logit gap
  pdserve verify --base-url http://a:9000 --reference http://b:8000   any two OpenAI endpoints
  pdserve verify --features                        every feature: combined, over shm and tcp, and after preemption
"""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Flags of `verify`."""

    model: str = flag("", "folder of the model, or its name on the hub (default: SmolLM2-135M-Instruct)")
    dtype: str = flag(
        "float32", "dtype of the weights and KV in P/D, combined and transformers", choices=("float32", "bfloat16")
    )
    transport: str = flag(
        EACH, "transport of the KV hop; `each`: all that this machine can run; the others are listed with the reason",
        choices=(EACH, *NAMES),
    )  # fmt: skip
    device: str = flag(
        EACH, "device kinds of P and D: one kind for both, or P:D such as cpu:cuda; `each`: every pair of this machine"
    )
    prompts: int = flag(12, "prompts, with lengths around block and chunk boundaries", parse=int)
    max_tokens: int = flag(32, "tokens generated for each, 2 or more", parse=int)
    kv_cache_memory: str = flag("256MiB", "KV pool of each instance")
    base_url: str = flag("", "URL of a running server, to compare with --reference; nothing is started")
    reference: str = flag("", "URL of the server that --base-url is compared with")
    features: bool = flag(False, "test every sampling and output feature in every serving mode, and print a table")


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when all are equal (in bfloat16: when all were compared), 1 when they diverge."""
    options = parse(argv)
    logs.configure("ERROR")  # hide the messages of instances starting
    unwind_on_sigterm()
    if options.base_url:
        from pdserve.verify_endpoints import verify_endpoints

        return verify_endpoints(options.base_url, options.reference, options.prompts, options.max_tokens)
    if options.features:
        return _main_of_features(options)
    devices = choose_pairs(options.device)
    hops = _requested_transports(options.transport, devices)
    folder = model.find_folder(os.environ, EngineOptions(model=options.model))
    longest = read_model_files(str(folder)).max_model_len - 2 * options.max_tokens - MORE_TOKENS
    prompts = make_prompts(folder, options.prompts, longest)
    name = Path(options.model or folder).name
    count = f"{len(prompts)} prompt{'' if len(prompts) == 1 else 's'}"
    print(f"{name}, {options.dtype}: {count}, {options.max_tokens} tokens each, greedy", flush=True)
    print(devices.describe(), flush=True)
    not_run = {
        _way_name(devices, pair, name): why for pair, chosen in hops.items() for name, why in chosen.lacking.items()
    }
    for way, why in not_run.items():
        print(f"not run: {way}: {why}", flush=True)
    with work_folder("verify") as work:
        outputs, next_turns = _serve(options, devices, hops, folder, work, prompts)
    oracle, reference = _run_transformers(options, folder, prompts)
    status = 0
    for way, turn in next_turns.items():
        expected = oracle.generate_greedy(turn.prompts, options.max_tokens, ignore_eos=True)
        num_cached = turn.num_cached_outputs(map(len, prompts))
        print(f"{way}: KV of {num_cached} generated tokens reused", flush=True)
        if options.dtype == "float32":
            status |= _report_exact(expected, {way: turn.outputs}, ())
        else:
            _report_gaps(oracle, turn.prompts, expected, {way: turn.outputs})
    if options.dtype == "float32":
        return _report_exact(reference, outputs, [*not_run]) | status
    return _report_gaps(oracle, prompts, reference, outputs)


def _requested_transports(transport: str, devices: DevicePairs) -> dict[DeviceKindPair, Chosen]:
    """Return the transports of each pair. Raises ConfigError if a requested transport runs on no pair."""
    hops: dict[DeviceKindPair, Chosen] = {}
    errors: list[ConfigError] = []
    for pair in devices.pairs:
        try:
            hops[pair] = choose(transport, pair=pair)
        except ConfigError as error:
            errors.append(error)
            hops[pair] = Chosen((), {transport: str(error)})
    if len(errors) == len(devices.pairs):
        raise errors[0]
    return hops


def _way_name(devices: DevicePairs, pair: DeviceKindPair, transport: str) -> str:
    return f"P/D over {transport}" if len(devices.pairs) == 1 else f"P/D {pair} over {transport}"


def _main_of_features(options: VerifyOptions) -> int:
    if options.dtype != "float32":
        raise ConfigError(f"--features compares exactly and needs --dtype float32, not {options.dtype}")
    from pdserve.verify_features import verify_features

    (pair,) = choose_pairs(AUTO if options.device == EACH else options.device).pairs
    if not pair.is_alike:
        raise ConfigError(f"--features needs the same device at both ends, not {options.device}")
    names = default_names(pair.prefill) if options.transport == EACH else NAMES
    transports = choose(options.transport, names, pair).names
    folder = model.find_folder(os.environ, EngineOptions(model=options.model))
    longest = read_model_files(str(folder)).max_model_len - max(options.max_tokens, _FEATURE_ROOM)
    prompts = make_prompts(folder, 6, longest)[-2:]
    with work_folder("verify") as work:
        return verify_features(folder, work, prompts, transports, options.max_tokens, pair.prefill)


def parse(argv: Sequence[str]) -> VerifyOptions:
    """Parse the command line. Raises ConfigError."""
    parser = CommandParser(
        prog="pdserve verify",
        description="Prove that P/D, combined and transformers give the same tokens.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, VerifyOptions, "verify")
    options = from_namespace(VerifyOptions, parser.parse_args(argv))
    refuse_missing(options.model)
    if options.prompts < 1 or options.max_tokens < 2:
        raise ConfigError(
            f"--prompts {options.prompts} --max-tokens {options.max_tokens}: use at least one prompt and two tokens "
            "(prefill generates the first token, so one token would not test decode)"
        )
    if bool(options.base_url) != bool(options.reference):
        raise ConfigError("--base-url and --reference belong together: the URLs of the two servers to compare")
    return options


def _serve(
    options: VerifyOptions, devices: DevicePairs, hops: Mapping[DeviceKindPair, Chosen], folder: Path, work: Path,
    prompts: Sequence[Sequence[int]],
) -> tuple[dict[str, list[list[int]]], dict[str, VerifyOutputs]]:  # fmt: skip
    """Return the outputs by serving mode, and the next-turn outputs of the combined instances."""

    flags = ("--model", str(folder), "--dtype", options.dtype, "--kv-cache-memory", options.kv_cache_memory)
    outputs: dict[str, list[list[int]]] = {}
    next_turns: dict[str, VerifyOutputs] = {}
    with asyncio.Runner() as runner:
        for pair, transport in ((pair, name) for pair, chosen in hops.items() for name in chosen.names):
            way, place = _way_name(devices, pair, transport), work / f"{pair.prefill}-{pair.decode}-{transport}"
            served = through_pd(runner, place, flags, transport, pair, prompts, options.max_tokens)
            print(f"served by {way}: {served.kv_bytes:,} bytes of KV sent", flush=True)
            outputs[way] = served.outputs
        for kind in devices.kinds:
            way = "combined" if len(devices.kinds) == 1 else f"combined on {kind}"
            own = (*flags, "--device", kind)
            first, after = through_combined(runner, work / f"combined-{kind}", own, prompts, options.max_tokens)
            outputs[way], next_turns[f"the next turn, {way}"] = first.outputs, after
            print(f"served by one {way.replace('combined', 'combined instance')}", flush=True)
    return outputs, next_turns


def _run_transformers(
    options: VerifyOptions, folder: Path, prompts: Sequence[Sequence[int]]
) -> tuple["Oracle", list[list[int]]]:
    from engine.oracle import Oracle

    oracle = Oracle(folder, options.dtype)
    reference = oracle.generate_greedy(prompts, options.max_tokens, ignore_eos=True)
    print(f"generated by {REFERENCE}", flush=True)
    return oracle, reference


def _report_exact(reference: Outputs, outputs: Mapping[str, Outputs], not_run: Sequence[str]) -> int:
    status = 0
    for way, found in outputs.items():
        divergence = first_divergence(reference, found)
        if divergence is not None:
            print(f"DIFFERENT: {way} against {REFERENCE}: {divergence}")
            status = 1
    if status == 0:
        left_out = f" (not run: {', '.join(way.removeprefix('P/D over ') for way in not_run)})" if not_run else ""
        print(f"equal: {' = '.join([*outputs, REFERENCE])}{left_out}")
    return status


def _report_gaps(
    oracle: "Oracle", prompts: Sequence[Sequence[int]], reference: Outputs, outputs: Mapping[str, Outputs]
) -> int:
    for way, found in outputs.items():
        divergences = all_divergences(reference, found)
        print(f"{way} against {REFERENCE}: {len(reference) - len(divergences)} of {len(reference)} prompts equal")
        for one in divergences:
            context = [*prompts[one.prompt], *reference[one.prompt][: one.position]]
            if one.found is None:
                print(f"  {one}")
                continue
            gap = oracle.logit_gap(context, one.found)
            print(f"  {one}; in {REFERENCE} that token's logit is {gap.gap:.4g} below the best one")
    return 0
