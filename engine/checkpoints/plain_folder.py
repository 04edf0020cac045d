"""Convert a model folder without safetensors or tokenizer.json, once, into one in the cache that has them.

pytorch_model*.bin     --bin_conversion-->  *.safetensors
vocab.json, merges.txt --vocab_tokenizer--> tokenizer.json
config.json and similar files are copied; existing safetensors are linked; code is not copied.

A separate process converts, so that this one neither imports torch nor reads pickles.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.checkpoints.bin_files import BIN_INDEX, BinFiles, check_archive, find_bin_files
from engine.checkpoints.conversion_child import TIMEOUT_S, convert_in_child, run_conversion
from engine.checkpoints.file_digest import DIGEST_DIGITS, file_digest
from engine.checkpoints.model_cache import make_once
from engine.checkpoints.model_identity import read_json
from engine.models.families import support_of
from wire.errors import ConfigError

_FORMAT = "1"  # version of the result: with a new one, folders are converted again
_COPIED = (".json", ".jinja", ".txt", ".model")
_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
_WEIGHTS, _TOKENIZER = "weights", "tokenizer"


def ensure_plain(
    folder: Path, cache_dir: Path, progress: Callable[[str], None], *, name: str, weights: bool = True
) -> Path:
    """Return `folder`, or, if it lacks a part, its conversion in `<cache>/checkpoints/<name>-<digest>`.

    `weights`: whether they are needed; a scheduler reads none. Raises ConfigError for refused pickles.
    """
    parts = lacking(folder, weights=weights)
    if not parts:
        return folder
    target = cache_dir / "checkpoints" / f"{name}-{_digest(folder, parts)}"

    def make(staging: Path) -> Path:
        progress(f"{_description(folder, parts)} (once, into {target})")
        convert_in_child("engine.checkpoints.plain_folder", folder, staging / target.name, parts)
        return staging / target.name

    try:
        return make_once(target, make, progress, timeout_s=TIMEOUT_S)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be converted into {target}: {error}") from error


def lacking(folder: Path, *, weights: bool) -> tuple[str, ...]:
    """Return the parts that `folder` lacks. Raises ConfigError."""
    if not folder.is_dir():
        return ()
    bins = find_bin_files(folder) if weights else None
    found = ((_WEIGHTS, bins is not None), (_TOKENIZER, _has_vocab_alone(folder)))
    return tuple(part for part, is_lacking in found if is_lacking)


def _has_vocab_alone(folder: Path) -> bool:
    """Return whether the tokenizer is GPT-2's and has no tokenizer.json."""
    if (folder / "tokenizer.json").is_file():
        return False
    if not all((folder / name).is_file() for name in ("vocab.json", "merges.txt", "config.json")):
        return False
    settings = folder / "tokenizer_config.json"
    named = read_json(settings).get("tokenizer_class") if settings.is_file() else None
    if named:
        return named in _GPT2
    return support_of(str(read_json(folder / "config.json").get("model_type"))).has_gpt2_tokenizer


def _description(folder: Path, parts: Sequence[str]) -> str:
    if _WEIGHTS not in parts:
        return f"making tokenizer.json for {folder}"
    bins = find_bin_files(folder)
    assert bins is not None, "weights are to be converted, so there are .bin files"
    size = sum(file.stat().st_size for file in bins.files)
    return f"converting {folder} to safetensors: {len(bins.files)} .bin, {size / 1e6:,.0f} MB"


def _digest(folder: Path, parts: Sequence[str]) -> str:
    """Return a digest of all inputs of the conversion and of its parts: the same on every host."""
    digest = hashlib.sha256(json.dumps([_FORMAT, *parts]).encode())
    for file in _copied(folder):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)} ".encode() + content)
    bins = find_bin_files(folder) if _WEIGHTS in parts else None
    for file in bins.files if bins else _linked(folder):
        digest.update(f"{file.name} {file_digest(file)}".encode())
    return digest.hexdigest()[:DIGEST_DIGITS]


def _copied(folder: Path) -> list[Path]:
    """Return the small files, and an embedding model's stages (1_Pooling/config.json); no weight index."""
    found = [file for file in folder.iterdir() if file.suffix in _COPIED and file.name != BIN_INDEX]
    return sorted(file for file in (*found, *folder.glob("[0-9]_*/config.json")) if file.is_file())


def _linked(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def main(argv: Sequence[str]) -> int:
    """Convert FOLDER into TARGET with PARTS; a refusal is the last line of stderr."""
    folder, target, parts = Path(argv[0]), Path(argv[1]), argv[2:]
    return run_conversion(folder, lambda: _make(folder, target, parts))


def _make(folder: Path, target: Path, parts: Sequence[str]) -> None:
    bins = find_bin_files(folder) if _WEIGHTS in parts else None
    for file in bins.files if bins else ():
        check_archive(file)  # before the slow work
    target.mkdir()
    for file in _copied(folder):
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if _TOKENIZER in parts:
        from engine.checkpoints.vocab_tokenizer import write_tokenizer

        write_tokenizer(folder, target)
    if bins is not None:
        _write_weights(folder, bins, target)
        return
    for file in _linked(folder):
        (target / file.name).symlink_to(file.resolve())


def _write_weights(folder: Path, bins: BinFiles, target: Path) -> None:
    from transformers import AutoConfig

    from engine.checkpoints.bin_conversion import convert_bin

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tied = bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))
    except (OSError, ValueError, KeyError, TypeError):
        tied = False  # the engine's start reports a broken config; a head stored twice is correct in any case
    convert_bin(bins, target, tied=tied)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
