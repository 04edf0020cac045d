"""The doctor's checks of tables, their secret, and their environment variables."""

import os
from pathlib import Path

import pytest

from ranktable_tools.commands import GenArguments, gen
from ranktable_tools.doctor.case import DoctorTables, read_tables
from ranktable_tools.doctor.tables import check_llm_tools_path, check_secret, check_tables, check_variables
from ranktable_tools.errors import RanktableError
from tests.ranktable_tools.bench import Bench

IP = "127.0.0.1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tables of 1P1D and the scheduler."""
    gen(GenArguments(["4,5"], ["6,7"], True, str(tmp_path / "t"), ip=IP, device_type="cpu"), lambda line: None)
    return tmp_path / "t"


def _paths(folder: Path, ending: str = "45") -> list[str]:
    return [str(folder / f"global_ranktable_{IP}.json"), str(folder / f"local_ranktable_{IP}_{ending}.json")]


@pytest.mark.parametrize(
    ("ending", "words"),
    [("45", "this process is prefill-0"), ("67", "decode-0"), ("host", "is the scheduler")],
)
def test_the_role_is_derived_from_the_tables(tmp_path: Path, folder: Path, ending: str, words: str) -> None:
    bench = Bench(tmp_path)

    verdict = check_tables(bench.case(read_tables(_paths(folder, ending), bench.machine())))

    assert verdict.result == "ok"
    assert verdict.message.startswith("1 prefill, 1 decode; ")
    assert verdict.message.endswith(words)


def test_tables_come_from_the_guides_variables_in_any_order_of_files(tmp_path: Path, folder: Path) -> None:
    global_path, local_path = _paths(folder)
    environ = {"GLOBAL_RANK_TABLE_FILE_PATH": global_path, "RANK_TABLE_FILE_PATH": local_path}
    bench = Bench(tmp_path)

    by_variable = read_tables([], bench.machine(environ))

    assert by_variable == read_tables([local_path, global_path], bench.machine())
    assert by_variable.own is not None


def test_an_unreadable_table_is_a_failure_that_suggests_lint(tmp_path: Path, folder: Path) -> None:
    global_path, local_path = _paths(folder)
    Path(local_path).write_text(Path(local_path).read_text().replace('"4"', '"3"'))
    bench = Bench(tmp_path)

    verdict = check_tables(bench.case(read_tables([global_path, local_path], bench.machine())))

    assert verdict.result == "fail"
    assert "is not in the global table" in verdict.message
    assert verdict.next_step == f"ranktable lint {global_path} {local_path}"


def test_lint_findings_across_tables_are_failures(tmp_path: Path, folder: Path) -> None:
    bench = Bench(tmp_path)
    environ = {"NODE_PORTS": "8088"}

    verdict = check_tables(bench.case(read_tables(_paths(folder), bench.machine()), environ))

    assert verdict.result == "fail"
    assert 'NODE_PORTS is "8088"' in verdict.message
    assert verdict.next_step.startswith("ranktable lint ")


def test_two_instances_of_one_gpu_are_fine_if_allowed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    wanted = GenArguments(["0"], ["0"], True, str(tmp_path / "t"), IP, "8088,8089", "cuda", share_devices=True)
    made = gen(wanted, lambda line: None, {})
    files = [str(tmp_path / "t" / name) for name in (made.global_name, made.instances[1].file_name)]

    verdicts = [
        check_tables(bench.case(read_tables(files, bench.machine(), share_devices=shared))) for shared in (True, False)
    ]

    assert [verdict.result for verdict in verdicts] == ["ok", "fail"]
    assert "this process is decode-0" in verdicts[0].message
    assert "A device_id can be used only once" in verdicts[1].message


def test_without_a_table_there_is_nothing_to_check(tmp_path: Path) -> None:
    verdict = check_tables(Bench(tmp_path).case())

    assert (verdict.result, verdict.message) == ("not here", "no global table was given")


def test_a_second_global_table_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(RanktableError, match="2 global tables were given"):
        read_tables([_paths(folder)[0]] * 2, Bench(tmp_path).machine())


def _secret(tmp_path: Path, text: str | None, mode: int = 0o600, **environ: str) -> tuple[str, str]:
    path = tmp_path / "cluster_secret"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    verdict = check_secret(Bench(tmp_path).case(DoctorTables(str(tmp_path / "global.json")), environ))
    return verdict.result, verdict.message


def test_a_good_secret_is_ok_and_never_shown(tmp_path: Path) -> None:
    result, words = _secret(tmp_path, "5ec12e7" * 8)

    assert result == "ok"
    assert "5ec12e7" not in words


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("x" * 64, 0o640, "has mode 0640: others may have access"),
        ("x" * 31, 0o600, "has 31 bytes, not 32 to 4096"),
        ("x" * 5000, 0o600, "has 5000 bytes, not 32 to 4096"),
    ],
)
def test_a_secret_that_pdserve_would_refuse_is_a_failure(tmp_path: Path, text: str, mode: int, words: str) -> None:
    result, message = _secret(tmp_path, text, mode)

    assert result == "fail"
    assert message.endswith(words)


def test_no_secret_is_a_warning_a_named_missing_one_a_failure(tmp_path: Path) -> None:
    assert _secret(tmp_path, None)[0] == "warn"
    result, words = _secret(tmp_path / "b", None, PDSERVE_SECRET_FILE="/none/secret")
    assert (result, words) == ("fail", "PDSERVE_SECRET_FILE names /none/secret: No such file or directory")


def test_ones_own_unreadable_secret_is_reported_with_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranktable_tools.doctor.tables.os.access", lambda *_: False)  # root can read it anyhow
    path = tmp_path / "cluster_secret"
    path.write_text("x" * 64)
    path.chmod(0o200)

    verdict = check_secret(Bench(tmp_path).case(DoctorTables(str(tmp_path / "global.json"))))

    assert verdict.message == f"{path} has mode 0200: its owner, uid {os.getuid()}, may not read it"
    assert verdict.next_step == f"chmod 600 {path}"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_somebody_elses_secret_names_both_users(tmp_path: Path) -> None:
    path = tmp_path / "cluster_secret"
    path.write_text("x" * 64)
    path.chmod(0o600)
    os.chown(path, 12345, -1)

    verdict = check_secret(Bench(tmp_path).case(DoctorTables(str(tmp_path / "global.json"))))

    assert verdict.message == f"{path} belongs to uid 12345, but this is uid 0"


def test_variables_meant_for_other_programs_are_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    assert check_variables(bench.case()).result == "ok"
    assert check_variables(bench.case(environ={"RANK_TABLE_FILE": "/x"})).result == "warn"
    wrong = check_variables(bench.case(environ={"RANK_TABLE_FILE": "/x", "USE_OPENAI": "yes"}))
    assert wrong.result == "fail"
    assert wrong.message.startswith("USE_OPENAI is 'yes'; RANK_TABLE_FILE is set")
    assert wrong.next_step == "export USE_OPENAI=1; unset RANK_TABLE_FILE (start_servers.sh does it for its process)"


def test_llm_tools_path_leads_to_the_tool_or_is_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "PD_separate").mkdir()
    (tmp_path / "PD_separate" / "pd_ranktable_tools.py").touch()

    assert check_llm_tools_path(bench.case()).result == "not here"
    assert check_llm_tools_path(bench.case(environ={"LLM_TOOLS_PATH": str(tmp_path)})).result == "ok"
    missing = check_llm_tools_path(bench.case(environ={"LLM_TOOLS_PATH": "/none"}))
    assert (missing.result, missing.message) == ("fail", "there is no /none/PD_separate/pd_ranktable_tools.py")
