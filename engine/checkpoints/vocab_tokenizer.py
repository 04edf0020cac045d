"""Convert GPT-2's vocab.json and merges.txt, the only tokenizer files of older checkpoints (OPT, GPT-2).

Byte-level BPE: text -> pieces by GPT-2's pattern -> bytes as printable characters -> merges in their order.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.checkpoints.model_identity import read_json
from wire.errors import ConfigError

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def write_tokenizer(folder: Path, target: Path) -> None:
    """Write tokenizer.json into `target` from the files of `folder`. Raises ConfigError for invalid files."""
    settings = _optional(folder / "tokenizer_config.json")
    named = {**_optional(folder / "special_tokens_map.json"), **settings}
    try:
        tokenizer = Tokenizer(models.BPE(read_json(folder / "vocab.json"), list(_merges(folder / "merges.txt"))))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([token for name in _NAMED if (token := _token(named.get(name))) is not None])
        tokenizer.add_tokens(list(_added(folder)))
        tokenizer.post_processor = _post_processor(tokenizer, settings, named)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{folder}: vocab.json and merges.txt are not a tokenizer like GPT-2's: {error}") from error
    tokenizer.save(str(target / "tokenizer.json"))


def _merges(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs, one per line; the first line may be the version."""
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        pair = line.rstrip("\r").split(" ")
        if pair == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2:
            raise ConfigError(f"{file}, line {number}: {line[:40]!r} is not a pair of pieces")
        yield pair[0], pair[1]


def _added(folder: Path) -> Iterator[AddedToken]:
    """Yield the added tokens in the order of their ids."""
    tokens = _optional(folder / "added_tokens.json")
    for text in sorted(tokens, key=tokens.__getitem__):
        yield AddedToken(text, normalized=False)


def _post_processor(tokenizer: Tokenizer, settings: Mapping[str, Any], named: Mapping[str, Any]) -> Any:
    bos = _token(named.get("bos_token"))
    bos_id = None if bos is None else tokenizer.token_to_id(bos.content)
    if not settings.get("add_bos_token") or bos is None or bos_id is None:
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(
        single=f"{bos.content} $A", pair=f"{bos.content} $A $B", special_tokens=[(bos.content, bos_id)]
    )


def _token(value: object) -> AddedToken | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return AddedToken(value, special=True, normalized=False) if isinstance(value, str) and value else None


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
