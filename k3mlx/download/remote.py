"""What a repository on the hub holds, and the bytes of its files, through huggingface_hub.

Every failure becomes one of two: Trouble, which may pass and is worth another try, or a K3Error, which is
not. Owns neither files nor waiting. The client is requests in huggingface_hub 0.30, httpx in 1.0, httpx2 in
2.4; what is used here is common to the three.

The library's own `hf_hub_download` is not used: since 2.0 it gives up the partial file of a download that was
interrupted, and a shard of Kimi K3 has 16 GB.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from email.utils import parsedate_to_datetime
from importlib import import_module
from time import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session

from k3mlx import __version__
from k3mlx.checkpoint.untrusted import shown
from k3mlx.errors import K3Error, ModelFilesError, UsageError

LONGEST_WAIT = 86_400.0  # seconds; a server that asks for more is asked again after a day
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_DIGESTS = {"sha256": re.compile(r"[0-9a-f]{64}"), "git": re.compile(r"[0-9a-f]{40}")}


class Trouble(Exception):
    """A failure that may pass. `wait`: seconds that the server asked for, or None."""

    def __init__(self, text: str, wait: float | None = None) -> None:
        super().__init__(text)
        self.wait = wait


class RemoteFile(NamedTuple):
    """A file of a repository: name within it, bytes, and a digest of its content.

    kind: `sha256` of the bytes (LFS), or `git`, the SHA-1 of a git blob.
    """

    name: str
    size: int
    kind: str
    digest: str

    def hasher(self) -> Any:
        """A fresh hash object; fed all bytes of the file, its hexdigest is `digest`."""
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class Listing(NamedTuple):
    """The files of a repository at one commit."""

    commit: str
    files: tuple[RemoteFile, ...]


def checked_file(name: object, size: object, kind: object, digest: object) -> RemoteFile:
    """A RemoteFile from what somebody else wrote. Raises ModelFilesError for a path that leads elsewhere."""
    if not isinstance(name, str) or not all(map(_is_plain, name.split("/"))) or len(name) > 512:
        raise ModelFilesError(f"file name {shown(name)}; expected a plain path within the repository")
    pattern = _DIGESTS.get(kind) if isinstance(kind, str) else None
    if type(size) is not int or size < 0 or pattern is None or not pattern.fullmatch(str(digest)):
        raise ModelFilesError(f"{name}: size {shown(size)}, {shown(kind)} {shown(digest)}; expected a digest")
    return RemoteFile(name, size, str(kind), str(digest))


def _is_plain(part: str) -> bool:
    return (
        bool(part) and part.isprintable() and not part.startswith(".") and not re.search(r'[\\:*?"<>|]', part)
    )


class Hub:
    """One repository on one hub. timeout: seconds to connect, and seconds without a byte."""

    def __init__(self, repo: str, endpoint: str | None = None, timeout: float = 30.0) -> None:
        self.repo = repo
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.timeout = timeout
        self._has_token = get_token() is not None
        self._headers = build_hf_headers(library_name="k3mlx", library_version=__version__)

    def listing(self, revision: str) -> Listing:
        """The commit that `revision` is now, and its files. Raises Trouble or K3Error."""
        api = HfApi(endpoint=self.endpoint, library_name="k3mlx", library_version=__version__)
        with self._failures(f"{self.repo} at {revision}"):
            info = api.model_info(self.repo, revision=revision, timeout=self.timeout, files_metadata=True)
        if not re.fullmatch(r"[0-9a-f]{40}", str(info.sha)):
            raise ModelFilesError(
                f"{self.repo}: the hub names commit {shown(info.sha)}, expected 40 hex digits"
            )
        visible = [entry for entry in info.siblings or () if not entry.rfilename.startswith(".")]
        return Listing(str(info.sha), tuple(_from_sibling(entry) for entry in visible))

    @contextmanager
    def read(self, commit: str, file: RemoteFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Bytes of a file from `start`, or from 0 where the server would not: (where they begin, pieces).

        Raises Trouble or K3Error, and the pieces do; an end before the end of the file is a Trouble.
        """
        url = hf_hub_url(self.repo, file.name, revision=commit, endpoint=self.endpoint)
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with ExitStack() as stack:
            with self._failures(file.name):
                response, pieces = stack.enter_context(_stream(url, headers, self.timeout))
                first = self._begins(response, file, start)
            yield (0, iter(())) if first is None else (first, self._pieces(pieces, file, first))

    def _begins(self, response: Any, file: RemoteFile, start: int) -> int | None:
        """Where the body of a response begins in the file; None if it is not of this file's bytes."""
        if response.status_code == 416:
            return None
        if response.status_code not in (200, 206):
            raise self._refusal(file.name, response)
        if response.status_code == 200:
            return 0
        given = re.match(r"bytes (\d{1,18})-", response.headers.get("Content-Range", ""))
        if given is None or int(given[1]) != start:
            return None
        return start

    def _pieces(self, pieces: Iterator[bytes], file: RemoteFile, at: int) -> Iterator[bytes]:
        while at < file.size:
            with self._failures(file.name):
                piece = next(pieces, None)
            if piece is None:
                raise Trouble(f"{file.name}: the connection ended at byte {at} of {file.size}")
            piece = piece[: file.size - at]
            at += len(piece)
            yield piece

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Turn what the client raises into Trouble or K3Error."""
        try:
            yield
        except (OSError, _request_error()) as error:
            response = getattr(error, "response", None)
            if response is not None:
                raise self._refusal(what, response) from None
            text = " ".join(str(error).split()) or "no answer"
            raise Trouble(f"{what}: {type(error).__name__} ({text[:160]})") from None

    def _refusal(self, what: str, response: Any) -> Trouble | K3Error:
        status, headers = int(response.status_code), response.headers
        elsewhere = urlsplit(str(response.url)).netloc != urlsplit(self.endpoint).netloc
        if status in _PASSING or (elsewhere and status in (401, 403)):  # a signed address that has expired
            return Trouble(f"{what}: the server answers {status}", _wait_asked_for(headers))
        if status in (401, 403):
            return K3Error(self._denial(status, headers.get("X-Error-Code", "")))
        if status == 404:
            return UsageError(f"{what}: not found at {self.endpoint}; check the name and the revision")
        return K3Error(f"{what}: the server answers {status}, expected the file")

    def _denial(self, status: int, code: str) -> str:
        login = "`hf auth login`, or set HF_TOKEN"
        if code == "GatedRepo":
            return f"{self.repo}: accept its terms at {self.endpoint}/{self.repo}, then log in: {login}"
        if self._has_token:
            return (
                f"{self.repo}: the hub refused this token ({status}); it may be revoked or lack read access."
                f" Make one at {self.endpoint}/settings/tokens, then {login}"
            )
        return f"{self.repo}: not found, or not public ({status}); check the name, or log in: {login}"


def _from_sibling(entry: Any) -> RemoteFile:
    if entry.lfs is not None:
        return checked_file(entry.rfilename, entry.lfs.size, "sha256", entry.lfs.sha256)
    return checked_file(entry.rfilename, entry.size, "git", entry.blob_id)


@contextmanager
def _stream(url: str, headers: Mapping[str, str], timeout: float) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """A response and the pieces of its body, by whichever client the library has."""
    session: Any = get_session()
    if callable(getattr(session, "stream", None)):  # httpx: since 1.0
        with session.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            yield response, response.iter_bytes()
    else:
        with session.get(url, headers=headers, timeout=timeout, stream=True) as response:
            yield response, response.iter_content(1 << 16)


def _request_error() -> type[Exception]:
    """What the library's client raises when a request fails; that of requests is an OSError."""
    client = import_module(type(get_session()).__module__.partition(".")[0])
    return getattr(client, "RequestError", OSError)


def _wait_asked_for(headers: Mapping[str, str]) -> float | None:
    """Seconds from Retry-After (a number or a date) or from the hub's RateLimit (`"api";r=0;t=55`)."""
    asked = headers.get("Retry-After", "").strip()
    limit = re.search(r"\bt=(\d{1,9})", headers.get("RateLimit", ""))
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", asked):
        seconds = float(asked)
    elif asked:
        try:
            seconds = parsedate_to_datetime(asked).timestamp() - time()
        except (ValueError, TypeError, OverflowError):
            return None
    elif limit:
        seconds = float(limit[1])
    else:
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT)
