"""Every broken input of every package, by its heading in docs/broken-inputs.md."""

from collections.abc import Mapping

from tests.deploy import broken_commands as deploy
from tests.docs.broken_input import Broken
from tests.pdserve import broken_config as config
from tests.pdserve import broken_starts as starts
from tests.ranktable_tools import broken_commands as commands
from tests.ranktable_tools import broken_dialects as dialects
from tests.ranktable_tools import broken_inputs as tables

PARTS: tuple[Mapping[str, tuple[Broken, ...]], ...] = (
    tables.SECTIONS,
    dialects.SECTIONS,
    commands.SECTIONS,
    config.SECTIONS,
    starts.SECTIONS,
    deploy.SECTIONS,
)
SECTIONS: Mapping[str, tuple[Broken, ...]] = {title: inputs for part in PARTS for title, inputs in part.items()}
