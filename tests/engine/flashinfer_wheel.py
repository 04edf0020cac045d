"""The signatures of flashinfer's wheel, read from its sources: nothing of it is installed or imported.

A public name is followed from flashinfer/__init__.py to the file that defines it. Of a class, a method that hands its
keywords on to another of the same class has that one's signature.
"""

import ast
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pdserve.run_folder import default_cache_dir
from tests import data_wheel

VERSION = os.environ.get("PDSERVE_TEST_FLASHINFER", "0.7.2")
_PACKAGE = "flashinfer"
Node = TypeVar("Node", ast.FunctionDef, ast.ClassDef)


@cache
def find_wheel() -> "Wheel":
    """Return the wheel; the first call of a machine downloads 65 MB. Raises NoWheel."""
    return wheel_in(default_cache_dir(os.environ) / _PACKAGE, os.environ)


def wheel_in(folder: Path, environ: Mapping[str, str], version: str = VERSION) -> "Wheel":
    """Return the wheel unzipped below `folder`, downloading it where it is not there. Raises NoWheel."""
    return Wheel(data_wheel.wheel_in(folder, environ, "flashinfer-python", version, _is_wanted))


@dataclass(frozen=True, slots=True)
class Wheel:
    """An unzipped wheel: its Python sources."""

    root: Path

    def signature(self, name: str) -> Signature:
        """Return the signature of a public function. Raises LookupError."""
        return _signature(_find_definition(self._home(name), name, ast.FunctionDef))

    def methods(self, name: str) -> dict[str, Signature]:
        """Return the signatures of a public class's methods, without self. Raises LookupError."""
        owner = _find_definition(self._home(name), name, ast.ClassDef)
        found = {one.name: one for one in owner.body if isinstance(one, ast.FunctionDef)}  # the last of overloads
        return {method: _signature(found[_handed_on(one, found)], is_method=True) for method, one in found.items()}

    def _home(self, name: str) -> ast.Module:
        """Return the module that flashinfer/__init__.py imports a name from."""
        for node in ast.walk(self._parse_module(PurePosixPath(_PACKAGE, "__init__.py"))):
            if not isinstance(node, ast.ImportFrom) or node.level != 1 or not node.module:
                continue
            if name in [alias.asname or alias.name for alias in node.names]:
                path = PurePosixPath(_PACKAGE, *node.module.split("."))
                is_package = (self.root / path).is_dir()
                return self._parse_module(path / "__init__.py" if is_package else path.with_suffix(".py"))
        raise LookupError(f"flashinfer {self.root.name} has no {name}")

    def _parse_module(self, path: PurePosixPath) -> ast.Module:
        return ast.parse((self.root / path).read_text(encoding="utf-8"), str(path))


def _find_definition(module: ast.Module, name: str, kind: type[Node]) -> Node:
    found = [node for node in module.body if isinstance(node, kind) and node.name == name]
    if not found:
        raise LookupError(f"{name} is not defined where it is imported from")
    return found[-1]


def _handed_on(method: ast.FunctionDef, others: Mapping[str, ast.FunctionDef]) -> str:
    """Return the method of the same class that is called with this one's own **keywords, by default itself."""
    own = method.args.kwarg
    for node in ast.walk(method) if own else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in others:
            passed = [one.value for one in node.keywords if one.arg is None]
            if any(isinstance(value, ast.Name) and own and value.id == own.arg for value in passed):
                return node.func.attr
    return method.name


def _signature(function: ast.FunctionDef, *, is_method: bool = False) -> Signature:
    """Return names, kinds and defaults; a default that is not a literal is given as its source text."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [Parameter.empty] * (len(positional) - len(spec.defaults)) + [_value(one) for one in spec.defaults]
    made = [
        Parameter(
            one.arg, Parameter.POSITIONAL_ONLY if place < len(spec.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
        )
        for place, (one, default) in enumerate(zip(positional, defaults, strict=True))
    ]  # fmt: skip
    if spec.vararg:
        made.append(Parameter(spec.vararg.arg, Parameter.VAR_POSITIONAL))
    for one, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        made.append(
            Parameter(one.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else _value(default))
        )
    if spec.kwarg:
        made.append(Parameter(spec.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(made[1:] if is_method else made)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def differences(stand_in: Callable[..., Any], real: Signature, *, is_method: bool = False) -> list[str]:
    """Return what a call that `stand_in` takes could break in `real`: nothing where it takes no more.

    Names and places of what may be given by place, names of what may be given by keyword, what has to be given, and
    the defaults of what is left out.
    """
    own = [*inspect.signature(stand_in).parameters.values()][int(is_method) :]
    theirs, words = real.parameters, list[str]()
    places = [one.name for one in theirs.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    for place, parameter in enumerate(own):
        name, other = parameter.name, theirs.get(parameter.name)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or other is None:
            words.append(f"{name} is not taken")
            continue
        if parameter.kind is not parameter.KEYWORD_ONLY and (place >= len(places) or places[place] != name):
            words.append(f"{name} is not at place {place}")
        if other.kind is other.POSITIONAL_ONLY and parameter.kind is not parameter.POSITIONAL_ONLY:
            words.append(f"{name} is not given by name")
        if (parameter.default is parameter.empty) != (other.default is other.empty):
            words.append(f"{name}: one may be left out, the other not")
        elif parameter.default is not parameter.empty and parameter.default != other.default:
            words.append(f"{name} is {parameter.default!r} by default, not {other.default!r}")
    given = {parameter.name for parameter in own}
    words += [
        f"{one.name} has to be given" for one in theirs.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and one.name not in given
    ]  # fmt: skip
    return words


def _is_wanted(name: str) -> bool:
    path = PurePosixPath(name)
    if name.endswith(".dist-info/METADATA"):
        return True
    return path.suffix == ".py" and path.parts[0] == _PACKAGE and len(path.parts) <= 3 and path.parts[1] != "data"
