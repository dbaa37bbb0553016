"""Failing object stores: one line with the address, the store's own text and a hint, and no secret."""

from __future__ import annotations

import itertools
import os
import re
import socket

import pytest

from hexdata.storage import address, storage_of, translate_errors
from hexdata.storage.errors import fault_behind
from tests.kit.command_line import hexdata_run
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault

NUMBERS = itertools.count()


@pytest.fixture
def said(object_store, monkeypatch):
    """Return ``said(*words, timeout)``: the line of a command that fails, with a new client."""
    config = {**address._OPTIONS["s3"]["config_kwargs"]}
    config["retries"] = {"mode": "standard", "total_max_attempts": 2}

    def run(*words, timeout=60.0):
        # A client reads the environment when it is created.
        own = {**config, "read_timeout": timeout, "user_agent_extra": f"test-{next(NUMBERS)}"}
        monkeypatch.setitem(address._OPTIONS["s3"], "config_kwargs", own)
        done = hexdata_run(*words)
        assert done.status == 1
        assert len(done.err.splitlines()) == 1, done.err
        assert not any(secret in done.err for secret in (SECRET_KEY, ACCESS_KEY))
        return done.err

    yield run
    object_store.fail()


def require_message(line, path, text):
    assert line.startswith(f"hexdata: {path}"), line
    assert "the object store failed; found " in line
    assert text in line
    assert "AWS_ENDPOINT_URL" in line


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
        ({"AWS_PROFILE": "nobody"}, "(nobody) could not be found"),
        ({"AWS_ENDPOINT_URL": "10.0.0.5"}, "Invalid endpoint: 10.0.0.5"),
        ({"AWS_ENDPOINT_URL": "http://nowhere.invalid:9000"}, "http://nowhere.invalid:9000"),
    ],
)
def test_settings_with_which_no_store_is_found(said, bucket, monkeypatch, variables, text):
    ask = socket.getaddrinfo

    def getaddrinfo(host, *rest, **named):
        if host == "nowhere.invalid":  # without asking the network
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("NO_PROXY", "*")
    # By which a machine in a cloud gives credentials.
    for name in [name for name in os.environ if re.match("AWS_(CONTAINER|WEB_IDENTITY)", name)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    require_message(said("verify", bucket / "store"), bucket / "store", text)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("GET", status=403, count=99), "(AccessDenied)"),
        (Fault("GET", status=403, code="ExpiredToken", count=99), "(ExpiredToken)"),
        (Fault("GET", status=503, count=99), "(SlowDown)"),
        (Fault("GET", delay=30, count=99), "Read timeout on endpoint URL"),
        (Fault("GET", "manifest", cut=10, count=99), ""),
    ],
)
def test_requests_that_the_store_does_not_answer_well(said, bucket, object_store, fault, text):
    (bucket / "store" / "manifest.json").write_bytes(bytes(1000))
    object_store.fail(fault)
    line = said("verify", bucket / "store", timeout=0.3 if fault.delay else 60.0)
    require_message(line, bucket / "store", text)


def test_an_object_or_a_bucket_that_is_not_there(said, bucket):
    assert "not a hexdata store" in said("verify", bucket / "store")
    assert "No such file or directory" in said("show", f"{bucket}train-000000.tar:1")
    with pytest.raises(FileNotFoundError, match="none") as caught, translate_errors():
        storage_of(bucket / "none").open()
    assert fault_behind(caught.value) is None
    assert caught.value.filename == str(bucket / "none")
    for verb in ("shuffle", "load"):
        require_message(said(verb, "s3://test-no-such/store"), "s3://test-no-such/store", "NoSuchBucket")
