"""Every file that the documents and docstrings name exists, and so does the target of every link in them."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
NAMED = re.compile(rf"(?<![\w/.}}>-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)  # where `](` calls the item of a list


SOURCES = re.compile(r"(?<![\w/.*}>-])((?:[a-z0-9_]+/)*[a-z0-9_]+\.py)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
OTHERS = {  # of torch, torch_npu, FlashInfer, FlashAttention, vLLM, and what a user may have in their folder
    "torch/_meta_registrations.py", "test/test_scaled_matmul_cuda.py",
    "_op_plugin_docs.py", "torch_npu/npu/graphs.py", "flashinfer/__init__.py", "vllm/entrypoints/api_server.py",
    "entrypoints/llm.py", "engine.py", "wire.py", "hopper/flash_attn_interface.py",
}  # fmt: skip


def _docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""


def _missing_sources(source: Path, root: Path = ROOT) -> list[str]:
    """Return the files that docstrings name and that are not beside them, in their package, or in `root`."""
    package = root / source.relative_to(root).parts[0]

    def missing(text: str) -> list[str]:
        named = [name for name in SOURCES.findall(text) if name not in OTHERS]
        return [name for name in named if not any((at / name).exists() for at in (source.parent, package, root))]

    text = source.read_text(encoding="utf-8")
    return [name for docstring in _docstrings(text) for name in missing(docstring)] if missing(text) else []


def _missing_files(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    named = [(ROOT / name, name) for name in NAMED.findall(text)]
    linked = [(page.parent / link, link) for link in LINK.findall(CODE.sub("", text)) if "://" not in link]
    return [name for path, name in (*named, *linked) if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_by_a_page_exist(page: Path) -> None:
    assert _missing_files(page) == []


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "`docs/hand-off.md`, `kvtransfer/no_such.py`, [gone](gone.md), [site](https://example.org/x.md)\n"
    page.write_text(f"```python\ncalls[0](one)\n```\n{text}")

    assert _missing_files(page) == ["kvtransfer/no_such.py", "gone.md"]


@pytest.mark.parametrize("folder", [name for name in FOLDERS if any((ROOT / name).rglob("*.py"))])
def test_files_named_by_docstrings_exist(folder: str) -> None:
    missing = {str(source.relative_to(ROOT)): _missing_sources(source) for source in (ROOT / folder).rglob("*.py")}

    assert {source: names for source, names in missing.items() if names} == {}


def test_a_missing_source_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "package" / "inner" / "here.py"
    source.parent.mkdir(parents=True)
    (tmp_path / "package" / "there.py").write_text("")
    source.write_text('"""See here.py, there.py, package/there.py and gone.py."""\n')

    assert _missing_sources(source, tmp_path) == ["gone.py"]


def test_every_page_is_reachable_from_the_readme() -> None:
    """A reader reaches each page of docs/ from README.md, by links alone."""
    seen, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        left += [page.parent / link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]

    assert set(ROOT.glob("docs/*.md")) <= seen


def test_the_version_is_the_newest_one_of_the_changelog_and_the_chart() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dated = re.findall(r"^## (\S+) - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    chart = re.search(r"^version: (\S+)$", (ROOT / "deploy/helm/pdserve/Chart.yaml").read_text(), re.MULTILINE)

    assert dated[0] == project["version"]
    assert chart is not None
    assert chart[1] == project["version"]
