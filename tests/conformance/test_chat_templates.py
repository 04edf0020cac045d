"""A5: chat templates over real processes, combined and over P/D, compared with transformers."""

from pathlib import Path

import pytest

from tests.conformance.served import CHAT, Oracle, Served

pytestmark = pytest.mark.cluster

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("template_*.jinja"))


@pytest.mark.covers("A5.73")
def test_a_chat_continues_the_models_own_template(served: Served, oracle: Oracle) -> None:
    tokenizer = oracle.tokenizer
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)

    assert served.post("/tokenize", messages=CHAT).json()["tokens"] == ids
    assert served.chat()["usage"]["prompt_tokens"] == len(ids)
    assert served.chat_text() == oracle.generate(text)[0]


@pytest.mark.covers("A5.73")
def test_a_last_message_left_open_is_continued(served: Served, oracle: Oracle) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "the capital "}]
    text = oracle.tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)

    answer = served.chat_text(messages, continue_final_message=True, add_generation_prompt=False)

    assert answer == oracle.generate(text)[0]


@pytest.mark.covers("A5.76")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_template_that_ships_with_us_serves_a_chat(served: Served, oracle: Oracle, file: Path) -> None:
    template = file.read_text(encoding="utf-8")
    ids = oracle.tokenizer.apply_chat_template(
        CHAT, chat_template=template, add_generation_prompt=True, return_dict=False
    )

    answer = served.chat(chat_template=template, max_tokens=1)

    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert served.post("/tokenize", messages=CHAT, chat_template=template).json()["tokens"] == ids
