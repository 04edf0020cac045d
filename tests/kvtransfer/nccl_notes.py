"""What the processes of one machine did under NCCL's rules (nccl_rules.py), in a folder that is common to them."""

from dataclasses import dataclass
from pathlib import Path

_BROKEN = "broken"


@dataclass(frozen=True)
class Notes:
    """A folder in which several processes note what they did."""

    folder: Path

    def add(self, name: str, line: str) -> None:
        """Append a line to the notes of this name."""
        with (self.folder / name).open("a") as notes:
            notes.write(f"{line}\n")

    def broken(self) -> list[str]:
        """Return what went against the rules: what was noted as such, and receives that differ from their sends."""
        found = self._lines(_BROKEN)
        for sends in self.folder.glob("*.sent"):
            sent, taken = self._lines(sends.name), self._lines(sends.with_suffix(".taken").name)
            found += [f"{sends.stem} sent {sent} and took {taken}"] if sent[: len(taken)] != taken else []
        return found

    def links(self) -> int:
        """Return the number of communicators that carried something."""
        return len([*self.folder.glob("*.sent")])

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


class BrokenRules(list[str]):
    """What went against the rules in this process; noted for others too."""

    def __init__(self, notes: Notes | None) -> None:
        super().__init__()
        self._notes = notes

    def append(self, what: str) -> None:
        super().append(what)
        if self._notes is not None:
            self._notes.add(_BROKEN, what)
