"""A4: the extra request parameters, each by its effect, combined and over P/D."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.conformance.served import CHAT, PROMPT, Compared, Oracle, Served, events

pytestmark = pytest.mark.cluster

COUNTING = [*CHAT, {"role": "assistant", "content": "Paris, of"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED = {"temperature": 1.0, "max_tokens": 100}


@pytest.mark.covers("B.chat.10", "A4.59")
def test_echo_prepends_the_prompt_or_the_last_message(served: Served) -> None:
    going_on = {"continue_final_message": True, "add_generation_prompt": False}

    assert served.text(echo=True) == PROMPT + served.text()
    assert served.chat_text(COUNTING, echo=True, **going_on) == "Paris, of" + served.chat_text(COUNTING, **going_on)
    assert served.chat_text(CHAT, echo=True) == served.chat_text(CHAT)


@pytest.mark.covers("A4.60")
def test_add_generation_prompt_false_leaves_the_header_out(served: Served, oracle: Oracle) -> None:
    header = oracle.ids("<|im_start|>assistant\n")
    whole, bare = served.chat(), served.chat(add_generation_prompt=False)

    assert whole["usage"]["prompt_tokens"] - bare["usage"]["prompt_tokens"] == len(header)


@pytest.mark.covers("A4.61")
def test_add_special_tokens_differs_by_the_tokenizers_own(served: Served) -> None:
    """This tokenizer adds none; tests/scheduler/test_tokens.py has those that do."""
    counts = [served.completion(add_special_tokens=flag)["usage"]["prompt_tokens"] for flag in (True, False)]
    chat = [served.chat(add_special_tokens=flag)["usage"]["prompt_tokens"] for flag in (True, False)]

    assert (counts[0], chat[0]) == (counts[1], chat[1])


DOCUMENTS = "{% for document in documents %}{{ document.title }}: {{ document.text }}{% endfor %}"


@pytest.mark.covers("B.chat.9", "A4.62")
def test_documents_reach_the_templates_that_print_them(served: Served) -> None:
    documents = [{"title": "fox", "text": "quick"}, {"title": "dog", "text": "lazy"}]

    reported = served.chat_text(chat_template=DOCUMENTS, documents=documents)
    assert reported == served.text(prompt="fox: quickdog: lazy")
    assert served.chat_text(documents=documents) == served.chat_text()


@pytest.mark.covers("B.chat.7", "A4.63")
def test_a_request_may_bring_its_chat_template(served: Served) -> None:
    assert served.chat_text(chat_template="{{ messages[0].content }}!") == served.text(prompt=CHAT[0]["content"] + "!")
    for broken in ("{% for %}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}"):
        assert served.refused("/v1/chat/completions", chat_template=broken)["message"]


@pytest.mark.covers("B.chat.7", "A4.64")
def test_chat_template_kwargs_are_variables(served: Served) -> None:
    fields = {"chat_template": "{{ animal }}", "chat_template_kwargs": {"animal": "the quick brown fox"}}

    assert served.chat_text(**fields) == served.text()
    for reserved in ("messages", "tokenize", "chat_template"):
        assert served.refused("/v1/chat/completions", chat_template_kwargs={reserved: "x"})["message"]


@pytest.mark.covers("B.structured.2", "A4.65")
@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_response_format_requests_json(compared: Compared, endpoint: str) -> None:
    ask = compared.text if endpoint == "completion" else compared.chat_text
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}

    reported = ask(response_format=schema, guided_whitespace_pattern="", temperature=1.0, max_tokens=400, seed=2)
    jsonschema.validate(json.loads(reported), PERSON)
    compared.agree(endpoint, reported)
    assert ask(response_format={"type": "text"}) == ask()
    assert compared.refused(response_format={"type": "xml"})["param"] == "response_format"
    assert compared.refused(response_format={"type": "json_schema"})["param"] == "response_format.json_schema"


@pytest.mark.covers("A4.66")
@pytest.mark.parametrize("form", ["text", "object"])
def test_guided_json_holds_at_every_seed(compared: Compared, form: str) -> None:
    schema: Any = json.dumps(PERSON) if form == "text" else PERSON
    for seed in range(10):
        reported = compared.text(guided_json=schema, guided_whitespace_pattern="[ ]?", seed=seed, **SAMPLED)
        jsonschema.validate(json.loads(reported), PERSON)
        compared.agree(str(seed), reported)
    assert compared.refused(guided_json="{")["param"] == "guided_json"


@pytest.mark.covers("A4.67")
def test_guided_regex_holds_at_every_seed(served: Served) -> None:
    for seed in range(10):
        reported = served.chat_text(guided_regex="[a-c]{3,5}-[0-9]+x", seed=seed, **SAMPLED)
        assert re.fullmatch("[a-c]{3,5}-[0-9]+x", reported)
    assert served.refused(guided_regex="[a")["param"] == "guided_regex"


@pytest.mark.covers("A4.68")
def test_guided_choice_reaches_a_choice_and_its_prefix(served: Served) -> None:
    found = {served.text(guided_choice=["a", "ab", "cd"], seed=seed, temperature=2.0) for seed in range(24)}

    assert found <= {"a", "ab", "cd"}
    assert {"a", "ab"} <= found


SQL_EBNF = 'root ::= "SELECT " column " FROM " table\ncolumn ::= "a" | "b"\ntable ::= "t" | "u"'
SQL_LARK = 'start: "SELECT " COLUMN " FROM " TABLE\nCOLUMN: "a" | "b"\nTABLE: "t" | "u"'


@pytest.mark.covers("A4.69")
@pytest.mark.parametrize("grammar", [SQL_EBNF, SQL_LARK])
def test_guided_grammar_takes_both_notations(served: Served, grammar: str) -> None:
    for seed in range(5):
        assert re.fullmatch("SELECT [ab] FROM [tu]", served.text(guided_grammar=grammar, seed=seed, **SAMPLED))
    assert served.refused(guided_grammar="root ::= nothing_here")["param"] == "guided_grammar"


@pytest.mark.covers("A4.70")
def test_the_old_backends_names_are_accepted_and_others_are_not(served: Served) -> None:
    for backend in ("outlines", "lm-format-enforcer"):
        assert served.text(guided_choice=["yes"], guided_decoding_backend=backend) == "yes"
    refused = served.refused(guided_choice=["yes"], guided_decoding_backend="wishes")
    assert "Unknown guided decoding backend" in refused["message"]
    assert refused["param"] == "guided_decoding_backend"


@pytest.mark.covers("B.structured.6", "A4.71")
@pytest.mark.parametrize(("pattern", "allowed"), [("", ""), ("[ ]?", " "), ("[ \\n]{0,2}", " \n")])
def test_the_whitespace_pattern_defines_what_is_between_tokens(served: Served, pattern: str, allowed: str) -> None:
    properties = {"a": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    for seed in range(5):
        reported = served.text(guided_json=schema, guided_whitespace_pattern=pattern, seed=seed, **SAMPLED)
        assert set(re.sub(r'[{}":a0-9-]', "", reported)) <= set(allowed), reported


@pytest.mark.covers("B.structured.1", "A4.72")
def test_only_one_field_may_constrain_the_output(served: Served) -> None:
    both = {"guided_json": "{}", "guided_regex": "a"}
    assert served.refused(**both)["param"] == "guided_json"
    assert served.refused(guided_regex="a", response_format={"type": "json_object"})["param"] == "response_format"
    named = {"type": "function", "function": {"name": "f"}}
    refused = served.refused("/v1/chat/completions", guided_json="{}", tools=[named], tool_choice=named)
    assert refused["param"] == "tool_choice"


def test_a_field_that_constrains_nothing_is_not_blamed_for_another(served: Served) -> None:
    for neutral in ({"response_format": {"type": "text"}}, {"guided_json_object": False}):
        assert served.refused(guided_regex="[a", **neutral)["param"] == "guided_regex"


@pytest.mark.covers("B.structured.1", "B.structured.4")
def test_structured_outputs_is_todays_name_of_the_same(served: Served) -> None:
    fields = {"seed": 4, **SAMPLED}

    reported = served.text(structured_outputs={"json": PERSON, "disable_any_whitespace": True}, **fields)
    jsonschema.validate(json.loads(reported), PERSON)
    assert reported == served.text(guided_json=PERSON, guided_whitespace_pattern="", **fields)
    assert served.text(structured_outputs={"choice": ["one"]}) == "one"
    chunks = events(served.post("/v1/completions", prompt=PROMPT, stream=True, structured_outputs={"choice": ["one"]}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one"


@pytest.mark.covers("A9.134")
def test_the_guides_own_schema_with_references_is_followed(compared: Compared) -> None:
    schema = {
        "title": "Character", "type": "object",
        "properties": {
            "name": {"title": "Name", "maxLength": 10, "type": "string"},
            "age": {"title": "Age", "type": "integer"},
            "armor": {"$ref": "#/definitions/Armor"},
        },
        "required": ["name", "age", "armor"],
        "definitions": {"Armor": {"title": "Armor", "enum": ["leather", "chainmail", "plate"], "type": "string"}},
    }  # fmt: skip
    answer = compared.completion(guided_json=json.dumps(schema), max_tokens=5)
    assert answer["choices"][0]["finish_reason"] == "length"

    reported = compared.text(guided_json=json.dumps(schema), temperature=0.7, seed=3, max_tokens=300)
    if reported.endswith("}"):
        jsonschema.validate(json.loads(reported), schema)
    compared.agree("character", reported)
