"""Reading JSON that may be anything: bounded, no duplicate keys, no other error than ModelFilesError."""

import errno
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

from k3mlx.errors import ModelFilesError

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxlong = 40


class FileMissingError(ModelFilesError):
    """A file that should be there is not."""


def shown(value: Any) -> str:
    """A value from a file as it may appear in a message: short, printable, quoted if it is text."""
    return _REPR.repr(value)


def parse_json(data: bytes, source: str) -> Any:
    """Parse UTF-8 JSON. Raises ModelFilesError naming `source` for anything else and for keys given twice."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ModelFilesError(f"{source}: not usable JSON (nested too deeply)") from None
    except ValueError as error:
        raise ModelFilesError(f"{source}: not valid JSON ({error})") from None


def stat_file(path: Path) -> os.stat_result:
    """The status of a regular file. Raises ModelFilesError when there is none or it is something else."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileMissingError(f"{path}: file not found") from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: cannot be looked at ({reason(error)})") from None
    if not stat.S_ISREG(status.st_mode):
        raise ModelFilesError(f"{path}: not a regular file")
    return status


def read_bounded(path: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes. Raises ModelFilesError when it is larger or cannot be read."""
    size = stat_file(path).st_size
    if size <= limit:
        try:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise ModelFilesError(f"{path}: cannot be read ({reason(error)})") from None
        size = len(data)
        if size <= limit:
            return data
    raise ModelFilesError(f"{path}: {size} bytes, expected at most {limit}")


def reason(error: Exception) -> str:
    """What went wrong, without the file name that an OSError repeats."""
    return getattr(error, "strerror", None) or str(error)


def disk_is_full(error: OSError) -> bool:
    """Whether a write failed for want of space, on the disk or in the user's quota."""
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} appears twice")
            seen.add(key)
    return values


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
