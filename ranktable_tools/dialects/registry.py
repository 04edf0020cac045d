"""All dialects: find one by name, or detect the dialect of a document."""

from ranktable_tools.dialects import hccl, kubeinfer, mindie, modelarts, vllm_ascend
from ranktable_tools.dialects.dialect import Dialect, Document
from ranktable_tools.document import shown
from ranktable_tools.errors import RanktableError

DIALECTS: tuple[Dialect, ...] = (
    modelarts.DIALECT,
    hccl.HCCL_1_0,
    hccl.HCCL_1_2,
    kubeinfer.KUBEINFER,
    kubeinfer.OMNI_MERGED,
    mindie.DIALECT,
    vllm_ascend.DIALECT,
)
_NO_TABLE = "a table has server_group_list, server_list, or prefill_device_list and decode_device_list"


def named(name: str) -> Dialect:
    """Return the dialect of that name or alias. Raises RanktableError listing the known names."""
    for dialect in DIALECTS:
        if name in (dialect.name, *dialect.aliases):
            return dialect
    known = ", ".join(dialect.name for dialect in DIALECTS)
    raise RanktableError(f"unknown dialect {name!r}; known: {known}")


def detect(document: object) -> Dialect:
    """Return the dialect that matches a document's structure. Raises RanktableError unless exactly one does."""
    if not isinstance(document, dict):
        raise RanktableError(f"is {shown(document)}; must be an object", code="wrong-type", value=document)
    found = [dialect for dialect in DIALECTS if dialect.matches(document)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(dialect.name for dialect in found)
        raise RanktableError(
            f"the table could be {names}; choose one with --dialect", code="ambiguous-dialect", value=names
        )
    raise _unknown_dialect_error(document)


def _unknown_dialect_error(document: Document) -> RanktableError:
    if document.get("status") == "initializing":
        message = 'status is "initializing"; the table is not complete yet, wait for "completed"'
        return RanktableError(message, code="not-completed", json_path="status", value="initializing")
    if "rank_list" in document:
        message = (
            'rank_list is of HCCL version "2.0" (Ascend 950), which is not supported; write version "1.0" or "1.2"'
        )
        return RanktableError(message, code="bad-version", json_path="version", value=document.get("version"))
    return RanktableError(f"is not a ranktable; {_NO_TABLE}", code="unknown-dialect", value=sorted(map(str, document)))
