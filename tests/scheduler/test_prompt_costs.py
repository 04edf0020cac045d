"""What a prompt costs its tenant."""

from scheduler.load.loads import PromptFacts
from scheduler.queue.prompt_costs import PromptCosts


def test_a_prompt_costs_its_tokens_and_possible_output() -> None:
    costs = PromptCosts()

    assert costs.cost("", PromptFacts(1000, 16)) == 1016
    assert costs.cost("", PromptFacts(1000, 16, 4)) == 1064
    assert costs.cost("", PromptFacts(1000, 16, pooled=True)) == 1000


def test_a_high_limit_costs_the_tenants_usual_output() -> None:
    costs = PromptCosts()
    facts = PromptFacts(100, 100_000, 2)
    for _ in range(200):
        costs.ended("short", facts, 2 * 10)
        costs.ended("long", facts, 2 * 3000)

    assert costs.cost("short", facts) == 120
    assert costs.cost("long", facts) == 100 + 2 * 3000
    assert costs.cost("long", PromptFacts(100, 5)) == 105


def test_prompts_without_output_do_not_change_the_usual_output() -> None:
    costs = PromptCosts()
    before = costs.cost("", PromptFacts(100, 100_000))
    costs.ended("", PromptFacts(100, 1, pooled=True), 0)

    assert costs.cost("", PromptFacts(100, 100_000)) == before
