"""A server on loopback that speaks the part of the hub's protocol that a download uses.

Model info with files' sizes and digests, `resolve` with the hub's headers, LFS files through a redirect to a
second origin that knows byte ranges and must not see the token. Faults are queued per file name, one a request.
"""

import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

COMMIT = "3c1f0d2b4a5968778695a4b3c2d1e0f123456789"
INFO = "(model info)"  # the name under which faults of the API are queued


class Status(NamedTuple):
    """Answer with this status and these headers."""

    code: int
    headers: tuple[tuple[str, str], ...] = ()


class Cut(NamedTuple):
    """Close the connection after so many bytes of the answer."""

    after: int


class Stall(NamedTuple):
    """Send so many bytes of the answer, then nothing, until the server ends."""

    after: int


class Short(NamedTuple):
    """Send so many bytes of the answer, of a length that is not told, and end as if that were all."""

    after: int


class Corrupt(NamedTuple):
    """Send the answer with one bit of this byte of the file turned."""

    at: int


class WholeFile(NamedTuple):
    """Answer a range with 200 and the whole file, as some proxies do."""


class OtherRange(NamedTuple):
    """Answer a range with 206 and the file from this byte on."""

    start: int


class Sent(NamedTuple):
    """A request for content, its range, and the bytes of the file that were sent for it."""

    name: str
    start: int
    count: int


class HubServer(ThreadingHTTPServer):
    """Serves the files of a folder as repository `org/name`; those of `lfs` suffixes as LFS."""

    daemon_threads = True

    def __init__(self, folder: Path, lfs: tuple[str, ...] = (".safetensors", ".model")) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {
            p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
        }
        self.lfs = lfs
        self.commit = COMMIT  # of main
        self.commits = {COMMIT}  # all that can be asked for; they have the same files
        self.token: str | None = None  # required if set
        self.refused = Status(401)  # what a request without it gets
        self.faults: defaultdict[str, deque] = defaultdict(deque)
        self.sent: list[Sent] = []
        self.asked: list[str] = []  # every path
        self.ended = threading.Event()
        self.piece = 1 << 16  # bytes between two looks at `paused`
        self.paused: dict[str, tuple[int, threading.Event]] = {}  # by name: stop before this byte until set

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator["HubServer"]:
        """A server in a thread."""
        server = cls(folder)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sent_of(self, name: str) -> list[Sent]:
        return [sent for sent in self.sent if sent.name == name]

    def info(self) -> dict:
        entries = []
        for name, data in self.files.items():
            entry = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if name.endswith(self.lfs):
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return {"id": "org/name", "modelId": "org/name", "sha": self.commit, "siblings": entries}

    def handle_error(self, request, client_address) -> None:
        """A client that goes away in the middle is what these tests are about."""

    def server_close(self) -> None:
        self.ended.set()
        super().server_close()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format, *args) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        if path.startswith("/cdn/"):
            self._content(path.removeprefix("/cdn/"), cdn=True)
        elif self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._status(self.server.refused)
        elif path.startswith("/api/models/org/name"):
            self._info(path.removeprefix("/api/models/org/name"))
        elif path.startswith("/org/name/resolve/") and path.split("/")[4] in {"main", *self.server.commits}:
            self._resolve(path.split("/", 5)[5])
        else:
            self._status(Status(404, (("X-Error-Code", "RepoNotFound"),)))

    do_HEAD = do_GET  # whose bodies are not sent

    def _info(self, rest: str) -> None:
        fault = self._fault(INFO)
        if isinstance(fault, Status):
            self._status(fault)
        elif rest not in ("", "/revision/main", f"/revision/{self.server.commit}"):
            self._status(Status(404, (("X-Error-Code", "RevisionNotFound"),)))
        else:
            body = json.dumps(self.server.info()).encode()
            self._head(200, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
            self.wfile.write(body)

    def _resolve(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            self._status(Status(404, (("X-Error-Code", "EntryNotFound"),)))
        elif name.endswith(self.server.lfs):
            headers = [
                ("X-Repo-Commit", self.server.commit),
                ("X-Linked-Size", str(len(data))),
                ("X-Linked-Etag", f'"{sha256(data)}"'),
                ("Location", f"http://localhost:{self.server.server_port}/cdn/{name}"),
                ("Content-Length", "0"),
            ]
            self._head(302, headers)
        else:
            self._content(name, cdn=False)

    def _content(self, name: str, cdn: bool) -> None:
        data = self.server.files[name]
        fault = self._fault(name)
        if isinstance(fault, Status):
            self._status(fault)
            return
        if cdn and "Authorization" in self.headers:
            self._status(Status(400))
            return
        start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        if isinstance(fault, WholeFile | OtherRange):
            start = getattr(fault, "start", 0)
        if start and start >= len(data):
            self._status(Status(416))
            return
        headers = [("X-Repo-Commit", self.server.commit), ("ETag", f'"{git_sha1(data)}"')]
        short = isinstance(fault, Short)
        headers.append(("Connection", "close") if short else ("Content-Length", str(len(data) - start)))
        if start:
            headers.append(("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"))
        self._head(206 if start else 200, headers)
        if self.command != "HEAD":
            self._body(name, _corrupted(data, fault), start, fault)

    def _body(self, name: str, data: bytes, start: int, fault: object) -> None:
        end = start + fault.after if isinstance(fault, Cut | Stall | Short) else len(data)
        at = start
        try:
            while at < end:
                limit, resumed = self.server.paused.get(name, (len(data), None))
                if at >= limit and resumed:
                    resumed.wait()
                    limit = end
                piece = data[at : min(end, limit, at + self.server.piece)]
                self.wfile.write(piece)
                at += len(piece)
        finally:
            self.server.sent.append(Sent(name, start, at - start))
            self.close_connection |= isinstance(fault, Cut | Stall | Short)
        if isinstance(fault, Stall):
            self.server.ended.wait()

    def _fault(self, name: str) -> object:
        queued = self.server.faults[name]
        return queued.popleft() if queued else None

    def _status(self, status: Status) -> None:
        self._head(status.code, [*status.headers, ("Content-Length", "0")])

    def _head(self, code: int, headers: list[tuple[str, str]]) -> None:
        self.send_response(code)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()


def _corrupted(data: bytes, fault: object) -> bytes:
    if not isinstance(fault, Corrupt):
        return data
    changed = bytearray(data)
    changed[fault.at] ^= 1
    return bytes(changed)
