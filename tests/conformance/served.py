"""A client for one way of serving, and transformers as the reference."""

import json
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "the quick brown fox"
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "what is the capital of France?"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which ends with [DONE], once."""
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class Served:
    """Posts to one cluster."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Post a body whose model is the served one."""
        return self.http.post(path, json={"model": "tiny"} | body)

    def completion(self, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
        """Return a completion; greedy and of 8 tokens unless the fields say otherwise."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
        return self._json_of(self.post("/v1/completions", **body))

    def chat(self, messages: Any = None, **fields: Any) -> dict[str, Any]:
        """Return a chat; greedy and of 8 tokens unless the fields say otherwise."""
        body = {"messages": messages or CHAT, "max_tokens": 8, "temperature": 0} | fields
        return self._json_of(self.post("/v1/chat/completions", **body))

    def text(self, **fields: Any) -> str:
        """Return the text of a completion's one choice."""
        return str(self.completion(**fields)["choices"][0]["text"])

    def streamed(self, **fields: Any) -> str:
        """Return the text of a streamed completion's one choice."""
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True} | fields
        response = self.post("/v1/completions", **body)
        return "".join(chunk["choices"][0]["text"] for chunk in events(response))

    def chat_text(self, messages: Any = None, **fields: Any) -> str:
        """Return the text of a chat's one choice."""
        return str(self.chat(messages, **fields)["choices"][0]["message"]["content"])

    def refused(self, path: str = "/v1/completions", /, **body: Any) -> dict[str, Any]:
        """Return the error of a body that must be 400."""
        if path == "/v1/completions":
            body = {"prompt": PROMPT} | body
        elif "messages" not in body:
            body = {"messages": CHAT} | body
        response = self.post(path, **body)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        assert (error["code"], error["type"]) == (400, "invalid_request_error")
        return error

    def _json_of(self, response: httpx.Response) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


class Compared(Served):
    """Posts to one cluster and then to the other; both must have answered the same."""

    def __init__(self, http: httpx.Client, test: str, answers: dict[str, object]) -> None:
        super().__init__(http)
        self._test = test
        self._answers = answers

    def agree(self, name: str, found: object) -> None:
        """Fail unless the other way found the same under this name in this test."""
        assert self._answers.setdefault(f"{self._test} {name}", found) == found


class Oracle:
    """transformers over the same weights, in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._generated: dict[str, list[str]] = {}

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text without special ones."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def generate(self, text: str = PROMPT, **settings: Any) -> list[str]:
        """Return the texts that `generate` returns for a prompt, by default greedily and of 8 tokens.

        Once: two ways of serving are compared with each.
        """
        key = repr((text, settings))
        if key not in self._generated:
            self._generated[key] = self._generate(text, settings)
        return self._generated[key]

    def _generate(self, text: str, settings: dict[str, Any]) -> list[str]:
        ids = torch.tensor([self.ids(text)])
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | settings
        with torch.no_grad():
            made = self.network.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return [self.tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in made]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Return [len(ids), vocab] natural log probabilities of what follows each token."""
        with torch.no_grad():
            return torch.log_softmax(self.network(torch.tensor([ids])).logits[0].float(), dim=-1)
