"""A download request and its result, exchanged between two processes as JSON."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Self

from wire.errors import ConfigError

HUGGING_FACE, MODEL_SCOPE = "huggingface", "modelscope"
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?", re.ASCII)


def is_hub_name(text: str) -> bool:
    """Return whether this can be a hub model's name: `name` or `owner/name`, without the suffix of a file."""
    is_file = text.endswith((".gguf", ".safetensors", ".bin", ".json", ".git"))
    return bool(_NAME.fullmatch(text)) and ".." not in text and "--" not in text and not is_file


@dataclass(frozen=True, slots=True)
class DownloadJob:
    """A model of a hub. `weights`: whether to download them; a scheduler needs none.

    `revision` None is the hub's main revision; `download_dir` None is the hub library's cache.
    """

    name: str
    hub: str = HUGGING_FACE
    revision: str | None = None
    download_dir: str | None = None
    weights: bool = True

    def to_json(self) -> str:
        """Return the job for the other process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name} at revision {self.revision}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folder with the files of one revision; `commit` is its id, None if the hub has no commits."""

    folder: str
    commit: str | None = None

    def to_json(self) -> str:
        """Return the snapshot for the other process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote. Raises ConfigError if the other process reported an error instead."""
        values = json.loads(text)
        if "refused" in values:
            raise ConfigError(values["refused"])
        return cls(**values)
