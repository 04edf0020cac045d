"""start_servers.sh with one file of flags for every role: what each process prints, and what it accepts."""

from pathlib import Path

import pytest

from tests.cluster.guide import GuideCluster

pytestmark = pytest.mark.cluster


def test_one_file_starts_every_role_and_each_prints_its_part(fake_cluster: GuideCluster) -> None:
    logs = {name: process.log for name, process in fake_cluster.processes.items()}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}

    assert fake_cluster.client.post("/v1/completions", body).status == 200
    for log in logs.values():
        assert log.count("without effect: --use-v2-block-manager") == 1
        assert "--trust-remote-code (a model's own code is never run)" in log
    prefill, decode = fake_cluster.ports
    assert f"ports: control 0.0.0.0:{prefill}, KV any free port of 127.0.0.1, " in logs["prefill-0"]
    assert f"ports: control 0.0.0.0:{decode}, KV any free port of " in logs["decode-0"]
    assert "devices: rank 0 = device 4, rank 1 = device 5 on CPU cores" in logs["prefill-0"]
    assert "without effect on an instance: --chat-template (the scheduler serves the API)" in logs["decode-0"]
    public = f"ports: OpenAI API 0.0.0.0:{fake_cluster.port}"
    assert f"{public}\ndevices: none\nnext: it waits for prefill-0 " in logs["scheduler"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--middleware=s",), "--middleware is refused: third-party code is not run in the scheduler"),
        *(
            pytest.param(flags, words, marks=pytest.mark.long)
            for flags, words in (
                (("--max-num-seq=8",), "unknown flag --max-num-seq: did you mean --max-num-seqs?"),
                (("--ip=192.0.2.7",), "--ip 192.0.2.7 is not server_ip"),
                (("--kv-ip=192.0.2.7",), "--kv-ip 192.0.2.7 is not an address of this machine"),
            )
        ),
    ],
)
def test_an_invalid_flag_ends_the_process_with_2(
    tmp_path: Path, fake_model: Path, flags: tuple[str, ...], words: str
) -> None:
    with GuideCluster(tmp_path, fake_model, flags=("--engine=fake",)) as cluster:
        process = cluster.start("prefill-0", flags=flags)
        status = cluster.processes.pop("prefill-0").wait()

    assert status == 2
    assert words in process.log
