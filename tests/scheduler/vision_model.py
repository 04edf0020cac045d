"""The folder of a tiny LLaVA for the scheduler: an image is four tokens, whatever its size."""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.images.image_files import file_of, image_of
from tests.images.settings import LLAVA
from tests.scheduler.conftest import write_model

IMAGE = "<image>"
NUM_TOKENS, HIDDEN_SIZE = 4, 8
PNG = file_of(image_of(20, 10))
PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
TEXT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def write_vision_model(folder: Path, template: str = PARTS) -> Path:
    """Write the model; `template` is for chats."""
    write_model(folder, chat_template=template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.loads((folder / "config.json").read_text()) | {"hidden_size": HIDDEN_SIZE}
    tower = LLAVA["vision_config"] | {"image_size": 28}
    config = LLAVA | {"image_token_index": tokenizer.token_to_id(IMAGE), "text_config": text, "vision_config": tower}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"crop_size": {"height": 28, "width": 28}}))
    return folder


def data_url(data: bytes = PNG, kind: str = "image/png") -> str:
    """Return the data URL of a file."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    """Return the part of a chat."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def embeds_part(values: bytes = bytes(4 * NUM_TOKENS * HIDDEN_SIZE), **fields: Any) -> dict[str, Any]:
    """Return the part of a chat for embeddings with these bytes, as many as an image's in float32."""
    shape = {"data": base64.b64encode(values).decode(), "dtype": "float32", "shape": [NUM_TOKENS, HIDDEN_SIZE]}
    return {"type": "image_embeds", "image_embeds": shape | fields}


def chat(*parts: Any) -> list[dict[str, Any]]:
    """Return a conversation of one message; texts are parts too."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]
