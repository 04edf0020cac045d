"""Load xgrammar's C++ library through its tvm_ffi binding, without its Python package, which imports torch and triton.

The names and argument orders are those of release 0.2.8, which constraints.txt pins.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PREFIX = "xgrammar.tvm_ffi_binding."


@dataclass(frozen=True, slots=True)
class Binding:
    """The library's classes."""

    tokenizer_info: Any
    grammar_compiler: Any
    compiled_grammar: Any
    grammar_matcher: Any


def load_binding() -> Binding:
    """Load the library; a second call reuses it. Raises ModuleNotFoundError if a part is not installed."""
    spec = find_spec("xgrammar")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'xgrammar'", name="xgrammar")
    import tvm_ffi
    from tvm_ffi.libinfo import load_lib_module

    load_lib_module("xgrammar", "xgrammar_bindings", extra_lib_paths=[Path(spec.origin).parent])

    def bound(name: str) -> Any:
        return tvm_ffi.register_object(_PREFIX + name)(type(name, (tvm_ffi.Object,), {}))

    return Binding(*(bound(name) for name in ("TokenizerInfo", "GrammarCompiler", "CompiledGrammar", "GrammarMatcher")))
