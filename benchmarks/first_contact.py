"""The first hour on a machine with a card: every check and measurement as a step with a limit, and one report.

    scripts/first-contact cuda                      all steps, into ./first-contact-cuda-TIME
    scripts/first-contact npu --only selftest       one step
    scripts/first-contact cuda --resume FOLDER      the steps of FOLDER that are not done
    scripts/first-contact cpu --tiny                every step that a CPU has, on a tiny model: a smoke run

A step has 8 minutes. At its limit all its processes are stopped, and the next step starts. FOLDER/report.md is written
after each step; the step's output is in FOLDER/logs. Exit status: 0 if no step failed, else 1; 2 without a card.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contact.report import DONE, Report, StepResult
from benchmarks.contact.running import Interrupted, adopt_orphans, run_limited
from benchmarks.contact.steps import Step, find_card, steps_of
from devices.table import KINDS
from pdserve.termination import unwind_on_sigterm


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    report = Report(folder, card.kind, card.described, names, os.environ)
    report.write()
    print(f"{card.described}\nreport: {report.path}", flush=True)
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
    if step.not_here is not None:
        report.add(step.name, StepResult(f"not measured: {step.not_here}", 0.0, ()))
        return
    for output in step.outputs:
        output.unlink(missing_ok=True)
    report.add(step.name, StepResult("running", 0.0, ()))
    log, words = folder / "logs" / f"{step.name}.log", DONE
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    try:
        for command in step.commands:
            left_s = step.limit_s - (time.monotonic() - began)
            words = run_limited(command, log, limit_s=left_s, secrets=report.secrets, environ=step.environ)
            if words.startswith("timed out"):
                words = f"timed out after {step.limit_s:g} s"
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
    print(f"{step.name:<14} {result.words}, {result.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
