"""Turn structural tags (free text in which a trigger opens JSON of a schema) into Lark for llguidance.

{"structures": [{"begin": "<f=x>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}
"""

import json

from llguidance import StructTag

from wire.errors import InvalidGrammar


def tags_to_lark(text: str) -> str:
    """Return a Lark grammar of the tags. Raises InvalidGrammar."""
    wish = json.loads(text)
    structures, triggers = wish.get("structures"), wish.get("triggers")
    if not isinstance(structures, list) or not structures or not _texts(triggers):
        raise InvalidGrammar("a structural tag needs the lists structures and triggers; other forms need xgrammar")
    return StructTag.to_grammar([_tag(structure, triggers) for structure in structures], assume_special=False)


def _tag(structure: object, triggers: list[str]) -> StructTag:
    if not isinstance(structure, dict) or not _texts([structure.get("begin"), structure.get("end")]):
        raise InvalidGrammar("each structure needs the texts begin and end, and a schema")
    begin, schema = structure["begin"], structure.get("schema", {})
    if not isinstance(schema, dict):
        raise InvalidGrammar(f"the schema of {begin!r} must be an object")
    for trigger in triggers:
        if trigger and begin.startswith(trigger):
            return StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"])
    raise InvalidGrammar(f"{begin!r} must begin with one of the triggers {triggers}")


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
