"""Secrets are found by name, file and URL, and removed everywhere."""

from pathlib import Path

import pytest

from pdserve.redaction import redacted, secret_values


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password", "MY_CREDENTIALS", "X_AUTH"]
)
def test_variables_named_like_a_secret_are_secrets(name: str) -> None:
    assert secret_values({name: "hunter22", "HOME": "/root"}, ()) == ("hunter22",)


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("http://user:hunter22@proxy:3128", ("hunter22",)),
        ("user:hunter22@proxy:3128", ("hunter22",)),
        ("http://proxy:3128", ()),
        ("", ()),
    ],
)
def test_the_password_of_a_proxy_is_a_secret_and_its_host_is_not(url: str, secret: tuple[str, ...]) -> None:
    assert secret_values({"https_proxy": url}, ()) == secret


def test_the_password_of_any_url_is_a_secret() -> None:
    found = secret_values({"PIP_EXTRA_INDEX_URL": "https://me:hunter22@one/simple https://you:swordfish@two/"}, ())

    assert found == ("swordfish", "hunter22")


def test_the_content_of_a_secret_file_is_a_secret_and_its_path_not(tmp_path: Path) -> None:
    file = tmp_path / "cluster_secret"
    file.write_text("0123456789abcdef\n")

    found = secret_values({"PDSERVE_SECRET_FILE": str(file)}, (file, tmp_path / "none"))

    assert found == ("0123456789abcdef",)


def test_short_values_are_not_redacted() -> None:
    assert secret_values({"TOKENIZERS_PARALLELISM": "false", "API_KEY": ""}, ()) == ()


def test_a_secret_that_contains_another_is_removed_whole() -> None:
    secrets = secret_values({"A_KEY": "hunter22", "B_KEY": "hunter22-and-more"}, ())

    assert redacted("x hunter22-and-more y hunter22 z", secrets) == "x (hidden) y (hidden) z"
