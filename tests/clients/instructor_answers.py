"""Prints as JSON what instructor makes of answers of PDSERVE_URL; test_instructor.py runs it in a venv."""

import json
import os
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, field_validator

ASK: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 200
}  # fmt: skip


class Report(BaseModel):
    """What an answer must say."""

    city: Literal["Paris", "Rome"]
    cold: bool


class Doubted(Report):
    """A report whose first one is refused."""

    @field_validator("city")
    @classmethod
    def check(cls, city: str) -> str:
        """Refuse the first city."""
        tries.append(city)
        if len(tries) < 2:
            raise ValueError("look again")
        return city


tries: list[str] = []
client = instructor.from_openai(OpenAI(base_url=f"{os.environ['PDSERVE_URL']}/v1", api_key="none", max_retries=0))
whole = client.chat.completions.create(response_model=Report, **ASK)
parts = [part.model_dump() for part in client.chat.completions.create_partial(response_model=Report, **ASK)]
retried = client.chat.completions.create(response_model=Doubted, max_retries=3, **ASK)
print(
    json.dumps({
        "mode": client.mode.name, "whole": whole.model_dump(), "parts": parts, "retried": retried.model_dump(),
        "tries": tries,
    })
)  # fmt: skip
