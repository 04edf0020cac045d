"""Presigned URLs made by boto3, of both versions, against moto's S3 behind a gate that checks each signature."""

import ast
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from remote_files.download import download
from remote_files.limits import DownloadLimits, Retries, UploadLimits
from remote_files.upload import upload
from tests.conftest import MISSING
from tests.remote_files.raw_server import LOOPBACK
from tests.remote_files.signatures import SignatureGate
from wire.errors import ConfigError

pytestmark = [pytest.mark.anyio, pytest.mark.long]

BUCKET = "my-bucket"
KEY_ID = "AKIDEXAMPLE0123456789"
REGION = "us-west-2"
ODD_KEY = "in put/+~é&=.jsonl"
RETRIES = Retries(tries=2, first_delay_s=0.001)
DOWN = DownloadLimits(retries=RETRIES)
UP = UploadLimits(retries=RETRIES, expect_s=2)
# The guides' script, except for the text of its docstring, with their placeholders.
PRESIGN = """
import boto3
from botocore.exceptions import ClientError

def generate_presigned_url(s3_client, client_method, method_parameters, expires_in):
    try:
        url = s3_client.generate_presigned_url(
            ClientMethod=client_method, Params=method_parameters, ExpiresIn=expires_in
        )
    except ClientError:
        raise
    return url

s3_client = boto3.client("s3")
input_url = generate_presigned_url(
    s3_client, "get_object", {"Bucket": "MY_BUCKET", "Key": "MY_INPUT_FILE.jsonl"}, 3600
)
output_url = generate_presigned_url(
    s3_client, "put_object", {"Bucket": "MY_BUCKET", "Key": "MY_OUTPUT_FILE.jsonl"}, 3600
)
print(f"{input_url=}")
print(f"{output_url=}")
"""


@dataclass
class Bucket:
    """A bucket, its endpoint, and the keys that may sign for it."""

    url: str
    secret_key: str
    gate: SignatureGate

    def client(self, version: str = "s3") -> Any:
        """Return a client that signs by this version: s3 is 2, s3v4 is 4."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3", endpoint_url=self.url, region_name=REGION, aws_access_key_id=KEY_ID,
            aws_secret_access_key=self.secret_key, config=Config(signature_version=version),
        )  # fmt: skip

    def signed(self, method: str, key: str, version: str = "s3", expires_in_s: int = 3600) -> str:
        """Return a presigned URL."""
        params = {"Bucket": BUCKET, "Key": key}
        return str(self.client(version).generate_presigned_url(method, Params=params, ExpiresIn=expires_in_s))

    def content(self, key: str) -> bytes:
        """Return what is stored."""
        return bytes(self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())


@pytest.fixture(scope="session")
def bucket() -> Iterator[Bucket]:
    """Run moto's S3 with one bucket."""
    pytest.importorskip("boto3", reason=f"{MISSING}: boto3, of the extra `clients`")
    server_module = pytest.importorskip("moto.server", reason=f"{MISSING}: moto, of the extra `clients`")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):  # type: ignore[misc]  # werkzeug is there under --all alone
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:
            """Write nothing."""

    app = server_module.DomainDispatcherApplication(server_module.create_backend_app)
    secret_key = secrets.token_urlsafe(20)
    gate = SignatureGate(app, secret_key)
    server = make_server("127.0.0.1", 0, gate, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made = Bucket(f"http://127.0.0.1:{server.server_port}", secret_key, gate)
    try:
        made.client().create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.covers("A1.15")
@pytest.mark.parametrize("version", ["s3", "s3v4"])
@pytest.mark.parametrize("num_bytes", [0, 1000, 3_000_000])
async def test_a_file_is_uploaded_and_downloaded_by_presigned_urls(
    bucket: Bucket, tmp_path: Path, version: str, num_bytes: int
) -> None:
    sent, received = tmp_path / "out", tmp_path / "in"
    sent.write_bytes(secrets.token_bytes(num_bytes))

    await upload(sent, bucket.signed("put_object", ODD_KEY, version), rules=LOOPBACK, limits=UP)
    await download(bucket.signed("get_object", ODD_KEY, version), received, rules=LOOPBACK, limits=DOWN)

    assert bucket.content(ODD_KEY) == sent.read_bytes() == received.read_bytes()
    assert bucket.gate.refused == []


@pytest.mark.covers("A1.16")
@pytest.mark.parametrize("version", ["s3", "s3v4"])
async def test_an_expired_url_fails_with_a_reason(bucket: Bucket, tmp_path: Path, version: str) -> None:
    sent = tmp_path / "out"
    sent.write_bytes(b"x" * 2_000_000)
    # A key that expires in the past cannot be requested in version 4: its date can.
    urls = [_in_the_past(bucket, method, version) for method in ("get_object", "put_object")]

    with pytest.raises(ConfigError, match=r"answered 403 .*: AccessDenied: Request has expired .*valid until") as down:
        await download(urls[0], tmp_path / "in", rules=LOOPBACK, limits=DOWN)
    with pytest.raises(ConfigError, match=r"answered 403 .*: AccessDenied: Request has expired .*valid until") as up:
        await upload(sent, urls[1], rules=LOOPBACK, limits=UP)

    assert bucket.gate.refused == ["Request has expired"] * 2
    assert KEY_ID not in str(down.value) + str(up.value)
    bucket.gate.refused.clear()


def _in_the_past(bucket: Bucket, method: str, version: str) -> str:
    url = bucket.signed(method, "late.jsonl", version, -60 if version == "s3" else 1)
    head, mark, date = url.partition("X-Amz-Date=")
    return f"{head}{mark}2020{date[4:]}" if mark else url


@pytest.mark.parametrize("version", ["s3", "s3v4"])
async def test_a_url_signed_for_another_key_is_refused_without_its_secrets(
    bucket: Bucket, tmp_path: Path, version: str
) -> None:
    url = bucket.signed("get_object", "one.jsonl", version).replace("one.jsonl", "two.jsonl")

    with pytest.raises(ConfigError, match="SignatureDoesNotMatch: The request signature we calculated") as caught:
        await download(url, tmp_path / "in", rules=LOOPBACK, limits=DOWN)

    assert not any(part in str(caught.value) for part in url.partition("?")[2].split("&"))
    bucket.gate.refused.clear()


async def test_a_missing_key_fails_with_the_stores_message(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"answered 404 .*: NoSuchKey: The specified key does not exist"):
        await download(bucket.signed("get_object", "none"), tmp_path / "in", rules=LOOPBACK, limits=DOWN)


@pytest.mark.covers("A1.16")
async def test_the_guides_script_signs_urls_that_work(bucket: Bucket, tmp_path: Path) -> None:
    script = PRESIGN.replace("MY_BUCKET", BUCKET)
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "AWS_ENDPOINT_URL_S3": bucket.url,
        "AWS_DEFAULT_REGION": REGION, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": bucket.secret_key,
    }  # fmt: skip
    printed = subprocess.run(  # noqa: ASYNC221 - nothing else runs here
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=300
    ).stdout
    urls = {
        name: str(ast.literal_eval(value)) for name, _, value in (line.partition("=") for line in printed.splitlines())
    }
    bucket.client().put_object(Bucket=BUCKET, Key="MY_INPUT_FILE.jsonl", Body=b'{"custom_id": "a"}\n')
    fetched = tmp_path / "in.jsonl"

    await download(urls["input_url"], fetched, rules=LOOPBACK, limits=DOWN)
    await upload(fetched, urls["output_url"], rules=LOOPBACK, limits=UP)

    assert bucket.content("MY_OUTPUT_FILE.jsonl") == b'{"custom_id": "a"}\n'
    assert bucket.gate.refused == []


async def test_a_put_whose_answer_is_lost_is_resent_with_the_same_bytes(bucket: Bucket, tmp_path: Path) -> None:
    sent = tmp_path / "out"
    sent.write_bytes(b"again\n" * 1000)
    bucket.gate.answers_to_lose = 1

    await upload(sent, bucket.signed("put_object", "again.jsonl"), rules=LOOPBACK, limits=UP)

    assert bucket.gate.answers_to_lose == 0
    assert bucket.content("again.jsonl") == sent.read_bytes()
