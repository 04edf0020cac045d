"""The first hour on a machine with a card: every check and measurement as a step with a limit, and one report.

    scripts/first-contact cuda                      all steps, into ./first-contact-cuda-TIME
    scripts/first-contact npu --only selftest       one step
    scripts/first-contact cuda --resume FOLDER      the steps of FOLDER that are not done
    scripts/first-contact cpu --tiny                every step that runs on a CPU, on a tiny model: a smoke run

A step has 8 minutes. At its limit all its processes are stopped, and the next step starts. FOLDER/report.md is written
after each step; the output of every try is kept in FOLDER/logs. A closed terminal does not end the run. Exit status: 0
if no step failed, else 1; 2 for bad input or without a card, 130 after Ctrl-C.
"""

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contact.report import DONE, Report, StepResult
from benchmarks.contact.running import TIMED_OUT, Interrupted, adopt_orphans, run_limited
from benchmarks.contact.steps import SHOWS, Step, find_card, steps_of
from devices.table import KINDS
from pdserve.termination import unwind_on_sigterm


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/first-contact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(("steps, in this order:", *(f"  {name:<14}{shows}" for name, shows in SHOWS.items()))),
    )  # fmt: skip
    parser.add_argument("kind", choices=tuple(KINDS), help="kind of device; cpu only with --tiny")
    parser.add_argument("--only", metavar="STEP", help="run this step, whether it was done or not")
    parser.add_argument("--resume", metavar="FOLDER", type=Path, help="continue in the folder of an earlier run")
    parser.add_argument("--tiny", action="store_true", help="a smoke run on a tiny model")
    args = parser.parse_args(arguments)
    if KINDS[args.kind].traits.pools_on_host and not args.tiny:
        parser.error(f"{args.kind} is not a card: it needs --tiny")
    if args.resume is not None and not args.resume.is_dir():
        parser.error(f"--resume {args.resume}: there is no such folder")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that are not done; print a line for each."""
    args = parse(arguments)
    card = find_card(args.kind)
    if isinstance(card, str):
        print(f"first-contact: no {args.kind} card can be used here: {card}", file=sys.stderr)
        return 2
    folder = args.resume or Path.cwd() / f"first-contact-{args.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    steps = steps_of(card, folder.absolute(), tiny=args.tiny)
    names = [step.name for step in steps]
    if args.only is not None and args.only not in names:
        print(f"first-contact: --only {args.only}: the steps are {', '.join(names)}", file=sys.stderr)
        return 2
    adopt_orphans()
    unwind_on_sigterm()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    report = Report(folder, card.kind, card.described, names, os.environ)
    report.write()
    _say(f"{card.described}\nreport: {report.path}")
    try:
        for step in steps:
            if args.only == step.name or (args.only is None and not report.is_done(step.name)):
                _run(step, folder, report)
    except (Interrupted, KeyboardInterrupt):
        return 130
    return 1 if report.failed else 0


def _run(step: Step, folder: Path, report: Report) -> None:
    """Run one step and report it. Raises Interrupted after Ctrl-C, when its processes have ended."""
    began = time.monotonic()
    not_here = step.not_here
    if not_here is None and step.needs is not None and not report.is_done(step.needs):
        not_here = f"{step.needs} did not end well"
    if not_here is not None:
        report.add(step.name, StepResult(f"not measured: {not_here}", 0.0, ()))
        _say(f"{step.name:<14}not measured: {not_here}")
        return
    log, words = folder / "logs" / f"{step.name}.log", DONE
    log.parent.mkdir(exist_ok=True)
    for output in (*step.outputs, log):
        _set_aside(output)
    report.add(step.name, StepResult("running", 0.0, ()))
    _say(f"{step.name:<14}started, {step.limit_s:g} s at most, {log}")
    try:
        for command in step.commands:
            left_s = step.limit_s - (time.monotonic() - began)
            words = run_limited(command, log, limit_s=left_s, secrets=report.secrets, environ=step.environ)
            words = words.replace(TIMED_OUT, f"{TIMED_OUT} after {step.limit_s:g} s")
            if words != DONE:
                break
    except Interrupted:
        report.add(step.name, StepResult("interrupted", time.monotonic() - began, step.figures()))
        raise
    figures = step.figures()
    if words == DONE and any(figure.is_missing for figure in figures):
        words = "incomplete"
    result = StepResult(words, time.monotonic() - began, figures)
    report.add(step.name, result)
    _say(f"{step.name:<14}{result.words}, {result.seconds:.0f} s")


def _set_aside(file: Path) -> None:
    """Rename a file of an earlier try: NAME.log to NAME.1.log, or the next number."""
    if file.exists():
        numbers = (file.with_name(f"{file.stem}.{number}{file.suffix}") for number in itertools.count(1))
        file.rename(next(name for name in numbers if not name.exists()))


def _say(line: str) -> None:
    """Print a line, unless the terminal is gone."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
