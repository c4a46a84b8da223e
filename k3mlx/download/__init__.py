"""Downloading a model from the hub: resumable to the byte, verified by hash, spread over folders.

`download(Request(...))` is all of it. Owns no printing; `k3mlx.cli.download` does that.
"""

from .attempts import Meter, Patience
from .request import Request
from .run import Result, download

__all__ = ["Meter", "Patience", "Request", "Result", "download"]
