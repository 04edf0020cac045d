"""Make an instance's grammar store from its model folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from engine.interface import EngineInfo
from instance.config import InstanceConfig

if TYPE_CHECKING:
    from engine.grammar.store import GrammarStore


def make_grammars(config: InstanceConfig, info: EngineInfo) -> "GrammarStore | None":
    """Start the grammar store of the model's tokenizer; its `close` stops it.

    None where the folder has no tokenizer.json, for a model that only computes vectors, and for the fake engine, whose
    arithmetic tokens no grammar can constrain.
    """
    path = Path(config.options.model) / "tokenizer.json"
    if config.options.engine == "fake" or not info.generates or not path.is_file():
        return None
    from engine.grammar.store import GrammarStore  # needs the engine extra, which the fake engine does not need
    from engine.grammar.tokenizer_file import TokenizerFile

    return GrammarStore(TokenizerFile(str(path.resolve()), info.eos_token_ids, info.vocab_size))
