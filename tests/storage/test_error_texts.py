"""Messages of commands when an object store cannot be used, one for each fault."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.cli import main
from hexdata.retry import RetryPolicy
from hexdata.storage import address, retry
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault
from tests.pairs import FULL

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore

REACHING = (
    "Check the address, the network and the endpoint (for S3: AWS_ENDPOINT_URL), and run the command again."
)
CREDENTIALS = "Set them in the environment or in a profile, as for any other tool."
REFUSED = "Check the credentials in the environment and the profile, and whether they have expired."
DENIED = "Check that these credentials allow listing, reading and, to change the store, writing."
LATER = "Run the command again later; completed work is kept."
NO_HOST = "nowhere.invalid"
IN_CLOUDS = (
    "CONTAINER_CREDENTIALS_FULL_URI",
    "CONTAINER_CREDENTIALS_RELATIVE_URI",
    "WEB_IDENTITY_TOKEN_FILE",
)
"""Of variables by which a machine in a cloud gives credentials."""

Told = Callable[..., str]
NUMBERS = itertools.count()


@pytest.fixture
def told(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Told]:
    """Return ``told(line, **config)``: what a command says on standard error, with clients that try once."""
    monkeypatch.setattr(retry, "REQUESTS", RetryPolicy(attempts=1))

    def run(line: str, **config: Any) -> str:
        # A client reads the environment when it is created, so each command gets a new client.
        own = {"retries": {"max_attempts": 0}, "user_agent_extra": f"test-{next(NUMBERS)}", **config}
        monkeypatch.setitem(address._OPTIONS, "s3", {"use_listings_cache": False, "config_kwargs": own})
        monkeypatch.setattr("sys.argv", ["hexdata", *line.split()])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 1
        said = capsys.readouterr().err
        assert SECRET_KEY not in said
        assert ACCESS_KEY not in said
        return re.sub(r", after 1 attempt in \d+ s", "", said)

    yield run
    object_store.fail()


def test_no_credentials(told: Told, bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", *IN_CLOUDS):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    assert told(f"verify {bucket}store") == (
        f"hexdata: {bucket}store/manifest.json: the object store needs credentials; found none: Unable to "
        f"locate credentials. {CREDENTIALS}\n"
    )


def test_a_profile_that_there_is_not(told: Told, bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert told(f"verify {bucket}store") == (
        f"hexdata: {bucket}store/manifest.json: the object store needs credentials; found none: The config "
        f"profile (nobody) could not be found. {CREDENTIALS}\n"
    )


@pytest.mark.parametrize(
    ("status", "found", "reason", "hint"),
    [
        (401, "401 Unauthorized", "the object store does not accept the credentials", REFUSED),
        (403, "403 Forbidden", "the object store denies access", DENIED),
        (500, "500 Internal Server Error", "the object store failed at every attempt", LATER),
        (503, "503 Service Unavailable", "the object store failed at every attempt", LATER),
    ],
)
def test_an_answer_without_a_body(
    told: Told, bucket: UPath, object_store: ObjectStore, status: int, found: str, reason: str, hint: str
) -> None:
    object_store.fail(Fault("HEAD", status=status, count=99))
    said = told(f"convert . {bucket}store")
    assert said == f"hexdata: {bucket}store: {reason}; found {found}. {hint}\n"


@pytest.mark.parametrize(
    ("status", "found", "reason", "hint"),
    [
        (403, "AccessDenied: as asked", "the object store denies access", DENIED),
        (500, "InternalError: as asked", "the object store failed at every attempt", LATER),
        (503, "SlowDown: as asked", "the object store failed at every attempt", LATER),
    ],
)
def test_an_answer_that_names_its_fault(
    told: Told, bucket: UPath, object_store: ObjectStore, status: int, found: str, reason: str, hint: str
) -> None:
    (bucket / "store" / "manifest.json").write_bytes(b"{}")
    object_store.fail(Fault("GET", "manifest", status=status, count=99))
    said = told(f"verify {bucket}store")
    assert said == f"hexdata: {bucket}store/manifest.json: {reason}; found {found}. {hint}\n"


def test_no_such_bucket(told: Told) -> None:
    hint = "Check the address, or create the bucket."
    for line in ("verify s3://test-none/store", "convert . s3://test-none/store"):
        assert told(line) == f"hexdata: s3://test-none/store: there is no such bucket. {hint}\n"


def test_no_such_key(told: Told, bucket: UPath) -> None:
    assert told(f"verify {bucket}store") == (
        f"hexdata: {bucket}store: not a hexdata store: it has no manifest. Create one with "
        "`hexdata convert INPUT... STORE`.\n"
    )
    shard = f"{bucket}train-000000.tar"
    assert told(f"show {shard}:1") == f"hexdata: {shard}: No such file or directory\n"


def test_an_endpoint_that_nobody_listens_at(
    told: Told, bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        url = f"{endpoint}/{bucket.path.strip('/')}/store/manifest.json"
        assert told(f"verify {bucket}store") == (
            f"hexdata: {bucket}store/manifest.json: the object store does not answer; found Could not "
            f'connect to the endpoint URL: "{url}". {REACHING}\n'
        )


def test_a_name_that_leads_nowhere(told: Told, bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says it where there is no such name; without asking the network."""
    ask = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **named: Any) -> Any:
        if host == NO_HOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for name in ("NO_PROXY", "no_proxy"):  # a proxy would be asked for the name
        monkeypatch.setenv(name, NO_HOST)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{NO_HOST}:9000")
    url = f"http://{NO_HOST}:9000/{bucket.path.strip('/')}/store/manifest.json"
    assert told(f"verify {bucket}store") == (
        f"hexdata: {bucket}store/manifest.json: the host name of the object store is unknown; found "
        f'Could not connect to the endpoint URL: "{url}". Check the endpoint (for S3: AWS_ENDPOINT_URL) or '
        "the region, and that this machine can resolve host names.\n"
    )


def test_an_endpoint_that_is_none(told: Told, bucket: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "10.0.0.5")
    assert told(f"verify {bucket}store") == (
        f"hexdata: {bucket}store/manifest.json: the endpoint of the object store is not a valid URL; found "
        "Invalid endpoint: 10.0.0.5. Set it (for S3: AWS_ENDPOINT_URL) to a URL such as http://10.0.0.5:9000.\n"
    )


def test_an_answer_that_does_not_come(told: Told, bucket: UPath, object_store: ObjectStore) -> None:
    object_store.fail(Fault("GET", delay=30.0))
    url = f"{object_store.endpoint}/{bucket.path.strip('/')}/store/manifest.json"
    assert told(f"verify {bucket}store", read_timeout=1) == (
        f"hexdata: {bucket}store/manifest.json: the object store does not answer in time; found Read "
        f'timeout on endpoint URL: "{url}". {REACHING}\n'
    )


def test_an_answer_that_is_cut(told: Told, bucket: UPath, object_store: ObjectStore) -> None:
    (bucket / "store" / "manifest.json").write_bytes(bytes(1000))
    object_store.fail(Fault("GET", "manifest", cut=10, count=99))
    said = told(f"verify {bucket}store")
    begin = f"hexdata: {bucket}store/manifest.json: the object store failed at every attempt; found Response "
    assert said.startswith(begin)
    assert said.endswith(f". {LATER}\n")
    assert len(said.splitlines()) == 1


REASONS = {
    "InvalidAccessKeyId": "the object store does not know the access key",
    "SignatureDoesNotMatch": "the secret key does not match the access key",
    "ExpiredToken": "the credentials for the object store have expired",
    "RequestTimeTooSkewed": "the clock of this machine differs too much from that of the object store",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
    "InvalidToken": "the object store does not accept the credentials",
    "AccessDenied": "the object store denies access",
}


@pytest.mark.parametrize(
    ("code", "status"),
    [*((code, 403) for code in REASONS), ("ExpiredToken", 400), ("AuthorizationHeaderMalformed", 400)],
)
def test_a_status_alone_is_followed_by_a_request_for_its_reason(
    told: Told, bucket: UPath, object_store: ObjectStore, status: int, code: str
) -> None:
    """S3 answers HEAD without a body, and other requests with an error code."""
    object_store.fail(
        Fault("HEAD", status=status, count=99), Fault("GET", status=status, code=code, count=99)
    )
    lines = (f"verify {bucket}store", f"convert . {bucket}store", f"show {bucket}a.tar:1")
    number = list(REASONS).index(code)
    for line in lines if FULL else [lines[number % len(lines)]]:
        said = told(line)
        assert said.startswith(f"hexdata: {bucket}")
        assert f": {REASONS[code]}; found {code}: as asked. " in said
        assert len(said.splitlines()) == 1
