"""What the launcher tells a process in its environment, and the meeting with the others.

Imports mlx only in a process that was started with others.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from k3mlx.devices import import_mlx
from k3mlx.errors import UsageError

if TYPE_CHECKING:
    from .team import Team

_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def launched_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """The rank of this process among those that `mlx.launch` or `mpirun` started together; None if it is alone."""
    environ = os.environ if environ is None else environ
    if environ.get("MLX_RANK", "").isdecimal():
        return int(environ["MLX_RANK"])
    rank, size = (environ.get(name, "") for name in _MPI)
    return int(rank) if rank.isdecimal() and size.isdecimal() and int(size) > 1 else None


def own_address(environ: Mapping[str, str] | None = None) -> str:
    """An address of this machine at which the others of the launch reach it: the launcher's, else the host name's."""
    environ = os.environ if environ is None else environ
    rank = launched_rank(environ)
    try:
        hosts = json.loads(Path(environ["MLX_HOSTFILE"]).read_text(encoding="utf-8"))
        address = str(hosts[rank][0])
    except (KeyError, OSError, ValueError, LookupError, TypeError):
        address = environ.get("MLX_JACCL_COORDINATOR", "")  # that of rank 0, which is who asks
    if address:
        return address.rpartition(":")[0].strip("[]")
    return socket.gethostbyname(socket.gethostname())


@contextmanager
def joined(needed: bool = False) -> Iterator[Team | None]:
    """The ranks of this launch, None for a process alone; what is raised inside is told to all of them.

    needed: raise UsageError for a process alone, whose weights cannot be split.
    """
    if launched_rank() is None:
        if needed:
            raise UsageError(
                "--dense-parallel splits weights over ranks, but this process is alone: start it with mlx.launch -n N"
            )
        yield None
        return
    import_mlx()
    from .team import Team

    team = Team()
    try:
        yield team
    except SystemExit:
        raise
    except BaseException as error:
        team.fail(error)
        raise
