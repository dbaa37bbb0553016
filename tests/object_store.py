"""A real S3 server for tests, on loopback in a separate process, behind a layer that injects faults.

``python tests/object_store.py`` prints its port and serves until its standard input ends, so that it never
outlives the tests. ``Fault`` is how a test asks it to fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

CONTROL = "/-/faults"
CODES = {
    403: "AccessDenied",
    404: "NoSuchKey",
    405: "MethodNotAllowed",
    501: "NotImplemented",
    503: "SlowDown",
}
"""Error codes of S3 by status; other statuses are an InternalError."""
ACCESS_KEY, SECRET_KEY = "AKIAHEXDATATESTS", "not-a-secret-but-must-not-be-told"


@dataclass(frozen=True)
class Fault:
    """A fault of the next ``count`` requests of one kind.

    Attributes:
        method: Such as GET; empty for any.
        path: A regular expression that the path, with the query, matches somewhere.
        header: Name of a header that the request has; empty for any request.
        status: Answered in place of the real answer; 0 for the real one.
        code: Error code in the body of the answer with ``status``. Default: that of ``CODES``.
        delay: Seconds before the answer.
        cut: Bytes of the body after which the connection is cut; -1 for none.
        lose: Whether to execute the request before the answer with ``status``.
        count: Number of requests with this fault.
        skip: Number of requests of this kind before the fault.
    """

    method: str = ""
    path: str = ""
    header: str = ""
    status: int = 0
    code: str = ""
    delay: float = 0.0
    cut: int = -1
    lose: bool = False
    count: int = 1
    skip: int = 0


@dataclass(frozen=True)
class ObjectStore:
    """Address of the server, and access to its faults and requests."""

    endpoint: str

    def fail(self, *faults: Fault) -> None:
        """Inject faults, in place of all earlier ones."""
        self._ask([asdict(fault) for fault in faults])

    def requests(self) -> list[tuple[str, str]]:
        """Return method and path of the requests since the last call."""
        return [(method, path) for method, path in self._ask(None)["requests"]]

    def all_met(self) -> bool:
        """Return whether each of the faults has occurred."""
        return bool(self._ask(None)["met"])

    def wait_until_met(self, process: subprocess.Popen[bytes], seconds: float = 120) -> bool:
        """Wait until all faults have been met at least once, or the process ends; say which."""
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            if self.all_met():
                return True
            time.sleep(0.01)
        return False

    def _ask(self, orders: object) -> dict[str, Any]:
        request = urllib.request.Request(self.endpoint + CONTROL, json.dumps(orders).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found


@contextmanager
def serving() -> Iterator[ObjectStore]:
    """Start the server, and end it."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            port = int(process.stdout.readline())
            yield ObjectStore(f"http://127.0.0.1:{port}")
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def environment(store: ObjectStore) -> dict[str, str]:
    """Return the variables by which S3's libraries find the server, and nothing of the user's."""
    return {
        "AWS_ENDPOINT_URL": store.endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }


# --- the server's own process -------------------------------------------------------------------------


class _Failing:
    """Passes requests to the server, except those with a fault."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._faults: list[dict[str, Any]] = []
        self._seen: list[tuple[str, str]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path == CONTROL:
            return self._control(environ, start_response)
        with self._lock:
            self._seen.append((method, path))
            fault = next((f for f in self._faults if self._meets(f, environ)), None)
            if fault is not None and fault["skip"]:
                fault["skip"] -= 1
                fault = None
            if fault is not None:
                fault["count"] -= 1
                fault["met"] = True
        if fault is None:
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        time.sleep(fault["delay"])
        if fault["status"]:
            if fault["lose"]:
                list(self._app(environ, lambda *_: None))
            else:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            code = fault["code"] or CODES.get(fault["status"], "InternalError")
            body = f"<Error><Code>{code}</Code><Message>as asked</Message></Error>".encode()
            body = b"" if method == "HEAD" else body
            start_response(f"{fault['status']} As Asked", [("Content-Length", str(len(body)))])
            return [body]
        answer = self._app(environ, start_response)
        return answer if fault["cut"] < 0 else self._cut(answer, fault["cut"])

    @staticmethod
    def _meets(fault: dict[str, Any], environ: dict[str, Any]) -> bool:
        header = "HTTP_" + fault["header"].upper().replace("-", "_")
        return (
            fault["count"] > 0
            and fault["method"] in ("", environ["REQUEST_METHOD"])
            and (not fault["header"] or header in environ)
            and re.search(fault["path"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}") is not None
        )

    @staticmethod
    def _cut(answer: Iterable[bytes], after: int) -> Iterator[bytes]:
        yield b"".join(answer)[:after]
        raise ConnectionError("cut, as asked")

    def _control(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        orders = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._lock:
            if orders is not None:
                self._faults = orders
            met = bool(self._faults) and all(fault.get("met") for fault in self._faults)
            told = json.dumps({"requests": self._seen if orders is None else [], "met": met}).encode()
            if orders is None:
                self._seen = []
        start_response("200 OK", [("Content-Length", str(len(told)))])
        return [told]


def _serve() -> None:
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        disable_nagle_algorithm = True  # else an answer with a body waits 40 ms for an acknowledgement

    # Without moto's dispatcher, which looks for all services of AWS in each request.
    app = create_backend_app("s3")
    server = make_server("127.0.0.1", 0, _Failing(app), threaded=True, request_handler=Handler)  # type: ignore[arg-type]
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
