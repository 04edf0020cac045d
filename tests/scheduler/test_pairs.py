"""Two texts as one prompt, compared with transformers' output of the same tokenizer."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from scheduler.tokenizer.pairs import encode_pair, shortened

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "it", "rained", "all", "day"]


@pytest.fixture(params=["bert", "roberta", "none"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A vocabulary of words, with the template of one family."""
    vocab = {word: index for index, word in enumerate(["[CLS]", "[SEP]", "[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 0), ("[SEP]", 1)]
    if request.param == "bert":
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    elif request.param == "roberta":
        made.post_processor = processors.RobertaProcessing(("[SEP]", 1), ("[CLS]", 0))
    return made


@pytest.mark.parametrize("longest", [None, 40, 9, 8, 7])
def test_ids_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path, longest: int | None) -> None:
    first, second = "the cat sat on a mat", "it rained all day"
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(file))

    ids, begin = encode_pair(tokenizer, first, second, longest)

    cut = {} if longest is None else {"truncation": "longest_first", "max_length": longest}
    expected = oracle(first, second, **cut)
    assert list(ids) == expected["input_ids"]
    assert begin == expected.sequence_ids().index(1)


def test_the_second_token_type_starts_with_the_second_text(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode("the cat", "it rained")
    _, begin = encode_pair(tokenizer, "the cat", "it rained", None)

    assert encoding.type_ids[:begin] == [0] * begin
    if 1 in encoding.type_ids:
        assert encoding.type_ids.index(1) == begin


def test_a_text_without_tokens_begins_after_all_others(tokenizer: Tokenizer) -> None:
    ids, begin = encode_pair(tokenizer, "the cat", "", None)

    assert begin == len(ids)


@pytest.mark.parametrize(
    ("lengths", "room", "kept"),
    [
        ((6, 4), 10, (6, 4)),
        ((6, 4), 9, (5, 4)),
        ((6, 4), 8, (4, 4)),
        ((4, 6), 8, (4, 4)),
        ((3, 3), 4, (2, 2)),
        ((9, 2), 4, (2, 2)),
        ((9, 1), 4, (3, 1)),
        ((5, 5), 0, (0, 0)),
    ],
)
def test_the_longer_text_is_truncated_first(lengths: tuple[int, int], room: int, kept: tuple[int, int]) -> None:
    assert shortened(*lengths, room) == kept
