"""instructor: objects of a class in its default mode (tools), streamed in part, and after retries."""

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.own_venv import own_venv

pytestmark = [pytest.mark.cluster, pytest.mark.long]

CITIES = ("Paris", "Rome")


@pytest.fixture(scope="module")
def printed(pair: str) -> dict[str, Any]:
    """What it made of the answers, in a venv, since it goes with older releases of openai and rich."""
    script = Path(__file__).with_name("instructor_answers.py")
    done = subprocess.run(
        [own_venv("instructor"), "-P", script], env={**os.environ, "PDSERVE_URL": pair}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.mark.covers("B.clients.12")
def test_an_object_of_the_class_is_made_by_a_forced_call(printed: dict[str, Any]) -> None:
    assert printed["mode"] == "TOOLS"
    assert printed["whole"]["city"] in CITIES
    assert isinstance(printed["whole"]["cold"], bool)


@pytest.mark.covers("B.clients.12")
def test_parts_grow_to_the_object(printed: dict[str, Any]) -> None:
    cities = [part["city"] or "" for part in printed["parts"]]

    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(cities))
    assert len(set(cities)) > 2
    assert printed["parts"][-1] == printed["whole"]


@pytest.mark.covers("B.clients.12")
def test_a_refused_object_is_requested_again(printed: dict[str, Any]) -> None:
    assert len(printed["tries"]) == 2
    assert printed["retried"]["city"] == printed["tries"][-1]
