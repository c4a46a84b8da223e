"""What a download noted about itself, so that the next run goes on with the same commit and folders.

One JSON file beside what it describes. Owns its format; does not look at the files it names.
"""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k3mlx.checkpoint.resume import RECORD, RECORD_MAX, REPO_ID
from k3mlx.checkpoint.untrusted import parse_json, read_bounded
from k3mlx.errors import ModelFilesError

from .remote import Listing, RemoteFile, checked_file

FORMAT = 1


@dataclass
class Record:
    """revision: as asked for; dirs: further folders with shards; verified: digest by name of files outside
    the cache that had it when they were written or last hashed; complete: a run came to its end."""

    repo: str
    revision: str
    commit: str
    files: dict[str, RemoteFile]
    dirs: list[str] = field(default_factory=list)
    vision: bool = False
    complete: bool = False
    verified: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @classmethod
    def of(cls, repo: str, revision: str, listing: Listing) -> Record:
        return cls(repo, revision, listing.commit, {file.name: file for file in listing.files})

    def save(self, root: Path) -> None:
        """Write the record of `root`, replacing it whole."""
        path = root / RECORD
        with self._lock:
            text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
            beside = path.with_suffix(".new")
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, path)

    def verify(self, file: RemoteFile, root: Path) -> None:
        """Note that a file had the right hash."""
        with self._lock:
            self.verified[file.name] = file.digest
        self.save(root)


def read_record(root: Path) -> Record | None:
    """The record of `root`, None if there is none. Raises ModelFilesError when it cannot be used."""
    path = root / RECORD
    if not os.path.lexists(path):
        return None
    fields = parse_json(read_bounded(path, RECORD_MAX), str(path))
    try:
        return _from_json(fields)
    except (KeyError, TypeError, ValueError, AttributeError, ModelFilesError):
        raise ModelFilesError(
            f"{path}: not a record of a download; remove it and run `k3mlx download` again"
        ) from None


def _from_json(fields: dict[str, Any]) -> Record:
    files = {name: checked_file(*entry) for name, entry in fields["files"].items()}
    texts = [
        fields["repo"],
        fields["revision"],
        fields["commit"],
        *fields["dirs"],
        *fields["verified"].values(),
    ]
    if fields["format"] != FORMAT or not all(isinstance(text, str) for text in texts):
        raise ValueError
    if not REPO_ID.fullmatch(fields["repo"]) or not re.fullmatch(r"[0-9a-f]{40}", fields["commit"]):
        raise ValueError
    if any(name != file.name for name, file in files.items()):
        raise ValueError
    return Record(
        fields["repo"], fields["revision"], fields["commit"], files, fields["dirs"],
        bool(fields["vision"]), bool(fields["complete"]), fields["verified"],
    )  # fmt: skip
