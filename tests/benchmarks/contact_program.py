"""scripts/first-contact with steps of a test: python -P contact_program.py STEPS_JSON ARGUMENTS...

STEPS_JSON: [[name, [command, ...], limit_s, {other fields}], ...]; the last of each is optional
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import first_contact
from benchmarks.contact.report import Figure
from benchmarks.contact.steps import Card, Step


def _steps(card: Card, folder: Path, *, tiny: bool = False) -> list[Step]:
    return [
        Step(name, tuple(map(tuple, commands)), lambda: (Figure("3 GB/s", 0.5),), limit_s=limit_s, **dict(*others))
        for name, commands, limit_s, *others in json.loads(sys.argv[1])
    ]


def _find_card(kind: str) -> Card:
    return Card(kind, 1, "a card of a test")


vars(first_contact).update(find_card=_find_card, steps_of=_steps)
if __name__ == "__main__":
    sys.exit(first_contact.main(sys.argv[2:]))
