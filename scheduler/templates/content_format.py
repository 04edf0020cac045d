"""Derive from a chat template whether it expects a message's content as one text or as a list of parts."""

from collections.abc import Iterator
from enum import StrEnum

from jinja2 import nodes

_KEEPS_A_LIST = frozenset(("list", "select", "reject", "selectattr", "rejectattr", "reverse", "sort", "unique"))
_TYPE_TESTS = frozenset(("string", "iterable", "sequence", "mapping"))


class ContentFormat(StrEnum):
    """The content that a template expects; EITHER: the template tests the type of each content."""

    STRING = "string"
    OPENAI = "openai"
    EITHER = "either"


def expected_content_format(template: nodes.Template) -> ContentFormat:
    """Return OPENAI or EITHER if the template loops over a `content`, under any name it is assigned to, else STRING."""
    names = _names_of_content(template)
    if not any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For)):
        return ContentFormat.STRING
    asks = any(test.name in _TYPE_TESTS and _is_content(test.node, names) for test in template.find_all(nodes.Test))
    return ContentFormat.EITHER if asks else ContentFormat.OPENAI


def _names_of_content(template: nodes.Template) -> frozenset[str]:
    """Return the variables, namespace fields and macro parameters to which a message's content is assigned."""
    gifts = [*_assigned_names(template), *_passed_names(template)]
    names: frozenset[str] = frozenset()
    while (more := names | {name for name, value in gifts if _is_content(value, names)}) != names:
        names = more
    return names


def _assigned_names(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for node in template.find_all(nodes.Assign):
        target = node.target
        if isinstance(target, nodes.Name):
            yield target.name, node.node
        elif isinstance(target, nodes.NSRef):
            yield f"{target.name}.{target.attr}", node.node


def _passed_names(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """Yield each macro's parameters with the arguments of its calls."""
    parameters = {macro.name: [arg.name for arg in macro.args] for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in parameters:
            yield from zip(parameters[call.node.name], call.args, strict=False)
            yield from ((pair.key, pair.value) for pair in call.kwargs)


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            own = f"{node.node.name}.{node.attr}" if isinstance(node.node, nodes.Name) else None
            return node.attr == "content" or own in names
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return bool(key == "content")
        case nodes.Getitem(arg=nodes.Slice()):
            return _is_content(node.node, names)
        case nodes.Filter():
            return node.name in _KEEPS_A_LIST and _is_content(node.node, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.And() | nodes.Or():
            return _is_content(node.left, names) or _is_content(node.right, names)
    return False
