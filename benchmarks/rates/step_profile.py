"""Where one prefill and the decode steps spend their time, by torch's profiler."""

import time

from benchmarks.rates.cases import OFFLINE_REQUESTS, OUT, PREFILL_PROMPT, PROMPT, Run
from benchmarks.rates.ours import Ours

_DECODE_STEPS, _SHOWN = 10, 12


def profile(ours: Ours) -> None:
    """Print the operators of one prefill and of decode steps at the smallest and at a large batch."""
    _profile_steps(ours, f"prefill 1 x {PREFILL_PROMPT}", Run(1, PREFILL_PROMPT, OUT), decode=False)
    for batch in (1, OFFLINE_REQUESTS):
        _profile_steps(ours, f"decode, batch {batch}", Run(batch, PROMPT, OUT), decode=True)


def _profile_steps(ours: Ours, title: str, run: Run, *, decode: bool) -> None:
    """Run prompts to their end; profile the first step, or after all are prefilled ten of the others."""
    from torch.profiler import ProfilerActivity, profile

    ours.add(run)
    while decode and ours.core.load().uncomputed_tokens:
        ours.core.step()
    num_steps = _DECODE_STEPS if decode else 1
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        began = time.perf_counter()
        for _ in range(num_steps):
            ours.core.step()
        wall_us = (time.perf_counter() - began) * 1e6
    while ours.core.has_work():
        ours.core.step()
    events = recorded.key_averages()
    ops_us = sum(event.self_cpu_time_total for event in events)
    print(
        f"\n{title}: {wall_us / num_steps / 1000:.1f} ms a step, outside torch's operators {1 - ops_us / wall_us:.0%}"
    )
    for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:_SHOWN]:
        share, each = event.self_cpu_time_total / wall_us, event.self_cpu_time_total / num_steps / 1000
        print(f"  {event.key:48} {event.count / num_steps:6.0f} calls {each:8.2f} ms {share:5.0%}")
