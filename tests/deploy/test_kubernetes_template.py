"""The subset of Go's templates that renders the chart in tests."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.go_template import TemplateError, parse, render
from tests.deploy.helm_template import CHART, FUNCTIONS, documents
from tests.deploy.kube_values import ALL

DOT: dict[str, Any] = {
    "a": {"b": 1, "on": True, "off": False, "empty": "", "none": {}},
    "list": ["x", "y"],
    "name": "n",
}
# The output of Go's text/template and sprig for each, with DOT.
CASES = [
    ("plain", "plain"),
    ("{{ .a.b }}|{{ .a.on }}|{{ .a.off }}", "1|true|false"),
    ("x  {{- .name -}}  y", "xny"),
    ("x {{/* not said */}} y {{- /* nor this */ -}} z", "x  yz"),
    ("{{ if .a.on }}yes{{ else }}no{{ end }}{{ if .a.empty }}yes{{ else }}no{{ end }}", "yesno"),
    ('{{ if .a.off }}1{{ else if eq .name "n" }}2{{ else }}3{{ end }}', "2"),
    ("{{ if .a.off }}1{{ else if .a.empty }}2{{ else }}3{{ end }}!", "3!"),
    ("{{ with .a }}{{ .b }}{{ end }}{{ with .a.none }}never{{ end }}", "1"),
    ("{{ with .a.none }}{{ .b }}{{ else }}{{ .name }}{{ end }}", "n"),
    ("{{ range .list }}<{{ . }}>{{ end }}", "<x><y>"),
    ("{{ range $i, $x := .list }}{{ $i }}{{ $x }}{{ $.name }}{{ end }}", "0xn1yn"),
    ('{{ range $key, $value := dict "z" 1 "b" 2 }}{{ $key }}{{ $value }}{{ end }}', "b2z1"),
    ('{{ $x := .name }}{{ if true }}{{ $x := "inner" }}{{ $x }}{{ end }}{{ $x }}', "innern"),
    ('{{ define "t" }}[{{ .b }}]{{ end }}{{ include "t" .a }}{{ include "t" (dict "b" "q") | quote }}', '[1]"[q]"'),
    ('{{ .a.empty | default "other" }}{{ .name | default "other" }}', "othern"),
    ('{{ printf "%s-%v" .name 3 | trunc 2 | trimSuffix "-" }}', "n"),
    ("{{ and .a.on .name }}{{ or .a.empty .name }}{{ not .a.on }}", "nnfalse"),
    ("{{ add 1 2 3 }} {{ div 7 2 }} {{ ne 1 2 }}", "6 3 true"),
    ("a:{{ toYaml .a.none | nindent 2 }}", "a:\n  {}"),
    ("{{ toYaml .list | indent 1 }}", " - x\n - y"),
    ('{{ "q\\"\\\\" }}{{ squote "s" }}{{ `raw\\n` }}', "q\"\\'s'raw\\n"),
    ('{{ dir "/a/b/c" }}', "/a/b"),
]


def _render(text: str) -> str:
    nodes, defined = parse(text)
    return render(nodes, DOT, defined, FUNCTIONS)


@pytest.mark.parametrize(("text", "made"), CASES)
def test_templates_render_as_in_go(text: str, made: str) -> None:
    assert _render(text) == made


@pytest.mark.parametrize(("text", "message"), [
    ("{{ .nothing }}", "there is no nothing"),
    ("{{ .a.b.c }}", "there is no c"),
    ("{{ $x }}", r"no variable is called \$x"),
    ("{{ nothing 1 }}", "no function is called 'nothing'"),
    ("{{ include \"nothing\" . }}", "no template is called 'nothing'"),
    ("{{ if .a }}", "if without an end"),
    ("{{ end }}", "an end without its beginning"),
    ("{{ fail \"a message\" }}", "a message"),
    ("{{ .name ! }}", "what is ' !'"),
])  # fmt: skip
def test_a_typo_is_found(text: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        _render(text)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_helm_renders_the_chart_identically(name: str, tmp_path: Path) -> None:
    if shutil.which("helm") is None:
        pytest.skip("no helm here: it is in none of the registries that an installation asks")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(ALL[name]))
    done = subprocess.run(
        ["helm", "template", "pdserve", str(CHART), "--namespace", "models", "--values", str(tmp_path / "values.yaml")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = [each for each in yaml.safe_load_all(done.stdout) if each]

    assert sorted(map(_comparable, made)) == sorted(map(_comparable, documents(ALL[name])))


def _comparable(document: dict[str, Any]) -> str:
    """Return an object as text; a Secret without its random values."""
    return yaml.safe_dump(document | {"data": None} if document["kind"] == "Secret" else document)
