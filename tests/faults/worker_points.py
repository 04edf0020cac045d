"""The points of a request's two legs at which a vLLM worker has a fault."""

from testing.vllm_worker.faults import Point
from testing.vllm_worker.request import Leg

POINTS: dict[str, tuple[Leg, Point | None, int]] = {
    "P before its answer": ("prefill", "before", 0),
    "P has computed, its answer unfinished": ("prefill", "after", 0),
    "P has answered, D begins to read": ("prefill", "read", 0),
    "D before its answer": ("decode", "before", 0),
    "D has read the KV": ("decode", "during", 0),
    "D after its first token": ("decode", "during", 1),
    "D in mid-stream": ("decode", "during", 12),
    "D after its last token": ("decode", "after", 0),
    "P while no request is on it": ("prefill", None, 0),
    "D while no request is on it": ("decode", None, 0),
}
"""Whose fault, when, and after how many tokens; None: a worker that no request is on is killed."""
