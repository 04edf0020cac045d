"""Convert a SentencePiece vocabulary in a GGUF file (tokens with scores, byte fallback) to a BPE of `tokenizers`.

SentencePiece joins the neighbours whose joint token has the highest score. So each split of a token into two others
becomes a merge, ordered by the token's score.
"""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

_SPACE = "▁"
_NORMAL, _UNKNOWN = 1, 2  # gguf.TokenType
_DEFAULT_SPACE = True  # llama.cpp's default


def sentencepiece_bpe(fields: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer, without the tokens that never occur in text."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(tokens, fields["tokenizer.ggml.scores"], kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", _DEFAULT_SPACE)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces] if prefix else [spaces])
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer


def _merges(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Return all pairs of normal tokens that form a token: highest score first, for the same token lowest ids first."""
    ids = {token: index for index, token in enumerate(tokens) if kinds[index] == _NORMAL}
    found = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(found)]
