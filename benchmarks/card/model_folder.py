"""Write a shape as a model folder: random weights, and a tokenizer with one word for each id.

python -P benchmarks/card/model_folder.py cuda 1b FOLDER
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.torch_start import name_backends

if __name__ == "__main__":
    name_backends()

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.card.model import make_network
from benchmarks.card.shapes import SHAPES, Shape
from devices.interface import Device
from devices.table import find_kind


def write_model(shape: Shape, device: Device, folder: Path) -> None:
    """Write the model; the weights are made on `device`."""
    make_network(shape, device, "sdpa").save_pretrained(folder)  # type: ignore[operator]
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(shape.vocab_size)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    write_model(SHAPES[sys.argv[2]], find_kind(sys.argv[1]).open(), Path(sys.argv[3]))
