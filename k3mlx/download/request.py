"""What a download is asked for, and what it settles on before any file is touched: repository, commit, folders.

A record of an earlier run decides where it can: the same commit, the same folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants

from k3mlx.checkpoint.resume import RELEASED, REPO_ID
from k3mlx.errors import ModelFilesError, UsageError

from .attempts import Patience
from .places import CachedRepository, Folder, Place, cache_root
from .record import Record, read_record
from .remote import Listing

_REVISION = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9_][\w./-]{0,199}", re.ASCII)


@dataclass(frozen=True)
class Request:
    """What is to be downloaded, and how.

    repo: None is the one that `local_dir` has a record of, else the released Kimi K3.
    revision: a branch, tag or commit; None is the commit on record, else `main`.
    local_dir: None is the Hugging Face cache. dirs: further folders that take shards.
    endpoint, offline: None is what HF_ENDPOINT and HF_HUB_OFFLINE say.
    """

    repo: str | None = None
    revision: str | None = None
    local_dir: Path | None = None
    dirs: Sequence[Path] = ()
    vision: bool = False
    verify: bool = False
    max_workers: int = 8
    endpoint: str | None = None
    offline: bool | None = None
    patience: Patience = field(default_factory=Patience)

    def check(self) -> None:
        """Raise UsageError for what cannot be meant."""
        if self.repo is not None and not REPO_ID.fullmatch(self.repo):
            raise UsageError(f"{self.repo!r} is no repository; expected a name like {RELEASED}")
        if self.revision is not None and not _REVISION.fullmatch(self.revision):
            raise UsageError(f"--revision {self.revision!r}: expected a branch, a tag or a commit")
        if self.max_workers < 1:
            raise UsageError(f"--max-workers {self.max_workers}: expected 1 or more")
        if self.local_dir is not None and self.local_dir.exists() and not self.local_dir.is_dir():
            raise UsageError(f"--local-dir {self.local_dir}: a file, expected a folder")
        for folder in self.dirs:
            if not folder.absolute().parent.is_dir() or (folder.exists() and not folder.is_dir()):
                raise UsageError(f"--dirs {folder}: expected a folder, or a new one in a folder that exists")


def find_record(request: Request) -> tuple[Path, Record | None]:
    """Where the record of this download is kept, and the one of an earlier run."""
    if request.local_dir is None:
        root = cache_root(Path(constants.HF_HUB_CACHE), request.repo or RELEASED)
    else:
        root = request.local_dir.absolute()
    record = read_record(root)
    if record is not None and request.repo not in (None, record.repo):
        raise UsageError(f"{root}: holds {record.repo}, not {request.repo}; give another --local-dir")
    return root, record


def agree(request: Request, old: Record | None, listing: Callable[[str], Listing], repo: str) -> Record:
    """The commit and files to work on: those on record, else what `listing` says of the revision now.

    An explicit revision is looked up anew once an earlier download of it has come to its end.
    """
    same = old is not None and (
        request.revision in (None, old.commit) or (request.revision == old.revision and not old.complete)
    )
    if old is not None and same:
        record = old
    else:
        revision = request.revision or "main"
        record = Record.of(repo, revision, listing(revision))
        if old is not None:
            record.dirs, record.vision, record.verified = old.dirs, old.vision, old.verified
    record.vision |= request.vision
    record.complete = False
    return record


def places_of(request: Request, record: Record, root: Path) -> list[Place]:
    """The destination, then the further folders: those on record and those given now. Notes them on record."""
    kept = [Path(text) for text in record.dirs if Path(text).is_dir()]
    gone = [text for text in record.dirs if not Path(text).is_dir()]
    if gone and not request.dirs:
        raise ModelFilesError(
            f"{gone[0]}: took shards, but is not there; mount it, or name folders with --dirs"
        )
    given = [folder.absolute() for folder in request.dirs]
    others = [folder for folder in dict.fromkeys([*kept, *given]) if folder.resolve() != root.resolve()]
    record.dirs = [str(folder) for folder in others]
    cached = request.local_dir is None
    main = CachedRepository(root, record.commit) if cached else Folder(root, record.verified)
    return [main, *(Folder(folder, record.verified) for folder in others)]


def check_same_model(main: Place, record: Record) -> None:
    """Raise UsageError when a folder that nobody has a record of holds another model: its files are not ours."""
    file = record.files.get("config.json")
    path = main.folder / "config.json"
    if isinstance(main, CachedRepository) or file is None or not path.exists():
        return
    hasher = file.hasher()
    hasher.update(path.read_bytes())
    if hasher.hexdigest() != file.digest:
        raise UsageError(
            f"{path}: is not that of {record.repo} at {record.commit[:12]}; give another --local-dir,"
            " or remove the file if this folder is to become that model"
        )
