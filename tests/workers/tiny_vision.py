"""A random Idefics3 for vLLM: its LLaVA, Qwen2-VL and Gemma 3 need torchvision, whose PyPI wheel needs CUDA's torch."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForImageTextToText, Idefics3Config

from tests.engine.tiny_models import save_tiny_tokenizer

_VOCAB_SIZE = 384
_SIZE = 56  # pixels: 16 patches, which become 4 tokens
_SPECIAL = [
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_vision(folder: Path) -> Path:
    """Save the model in `folder` with its processor, tokenizer and chat template; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {
        "model_type": "llama", "vocab_size": _VOCAB_SIZE, "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384,
        "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    tower = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": _SIZE, "patch_size": 14,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text, vision_config=tower, scale_factor=2, image_token_id=tokenizer.token_to_id("<image>"),
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        network = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
    network.save_pretrained(folder)
    size = {"longest_edge": _SIZE}
    images = {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False, "size": size}
    _write(folder / "preprocessor_config.json", images | {"max_image_size": size})
    _write(folder / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 4})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    _write(folder / "tokenizer_config.json", settings | {"chat_template": _TEMPLATE, "model_max_length": 2048})
    return folder


def _write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values))
