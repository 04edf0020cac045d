"""Who wins, by how much and why, computed from the figures alone."""

from pdserve.bench.pd.outcome import FIGURES, medians
from pdserve.bench.pd.table import as_json, lines
from pdserve.bench.pd.utilisation import Use
from pdserve.bench.pd.verdict import where, why, winner
from tests.pdserve.bench.pd.outcomes import made

TTFT, _, _, GAP, RATE = FIGURES


def test_less_time_and_more_tokens_win_by_their_ratio_to_the_next() -> None:
    three = [made("P/D", 10, 5, 20, 300), made("colocated", 15, 5, 90, 450), made("vLLM P/D", 30, 9, 60, 100)]

    assert winner(TTFT, three) == ("P/D", 1.5)
    assert winner(GAP, three) == ("P/D", 3.0)
    assert winner(RATE, three) == ("colocated", 1.5)


def test_close_results_are_a_tie_and_failed_ones_do_not_compete() -> None:
    assert winner(TTFT, [made("P/D", 100, 5, 20, 300), made("colocated", 104, 5, 90, 450)]) is None
    assert winner(TTFT, [made("P/D", 1, 5, 20, 300, failed=1), made("colocated", 104, 5, 90, 450)]) is None
    assert winner(TTFT, []) is None


def test_wins_are_listed_with_load_and_factor() -> None:
    outcomes = [made("P/D", 10, 5, 20, 300), made("colocated", 15, 5, 90, 450), made("vLLM P/D", 30, 5, 60, 900)]

    assert list(where(outcomes)) == [
        "P/D wins 3 of 5 figures:",
        "  first token, burst: 1.50x",
        "  slowest first tokens, burst: 1.50x",
        "  longest gap, burst: 4.50x",
        "colocated wins 1 of 5 figures:",
        "  output tokens per second, burst: 1.50x",
        "P/D against vLLM P/D: better in 3 of 5 figures, worse in 1, else even",
    ]


def test_the_busier_instance_is_named_with_the_others_idle_share() -> None:
    outcomes = [
        made("P/D", 1, 1, 1, 1, use=Use({"decode-0": 0.97, "prefill-0": 0.3}, 4, 2.25, 3 * 2**20)),
        made("colocated", 1, 1, 1, 1, use=Use({"combined-0": 0.99, "combined-1": 0.9}, 0, None, None)),
        made("P/D", 1, 1, 1, 1, load="slow", use=Use({"decode-0": 0.5, "prefill-0": 0.1}, 0, None, None)),
        made("colocated", 1, 1, 1, 1, load="slow", use=Use({"combined-0": 0.3, "combined-1": 0.35}, 0, None, None)),
        made("vLLM P/D", 1, 1, 1, 1, load="slow"),
    ]

    assert list(why(outcomes)) == [
        "burst, P/D: decode-0 97% busy, prefill-0 30% busy: decode-0 was the limit, and 70% of prefill-0's time was "
        "idle; a KV hop took 2.2 ms for 3.0 MiB",
        "burst, colocated: combined-0 99% busy, combined-1 90% busy: both were at their limit",
        "slow, P/D: decode-0 50% busy, prefill-0 10% busy: decode-0 did more of the work, and neither was the limit",
        "slow, colocated: combined-1 35% busy, combined-0 30% busy: neither was the limit",
    ]


def test_the_table_has_a_column_per_contestant_and_the_failures() -> None:
    found = list(lines([made("P/D", 10, 5, 20, 300), made("colocated", 15, 5, 90, 450, failed=2)]))

    assert found[0].split() == ["load", "figure", "P/D", "colocated", "best"]
    assert found[1].split() == ["burst", "TTFT", "p50,", "ms", "10.0", "failed", "even"]
    assert found[-1] == "not compared: 2 requests failed in burst, colocated: HTTP 500: no"


def test_rounds_are_reported_as_medians() -> None:
    rounds = [
        made("P/D", ttft, 5, 20, 300, use=Use({"decode-0": ttft / 100}, 1, ttft, 1.0)) for ttft in (30, 10, 20)
    ] + [made("colocated", 1, 1, 1, 1)]

    first, second = medians(rounds)

    assert first.figures["ttft_p50_ms"] == 20
    assert first.use == Use({"decode-0": 0.2}, 3, 20, 1.0)
    assert second.use is None
    (found, _) = as_json([first, second])
    assert (found["contestant"], found["ttft_p50_ms"], found["use"]["hop_ms"]) == ("P/D", 20, 20)
