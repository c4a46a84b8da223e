"""Finding dense tensors among those of some files, where any matrix may be stored as MLX's codes.

Owns the three names of such a matrix (`weight`, `scales`, `biases`) and what is said of a tensor that is missing,
surplus or of another shape. Which tensors there should be is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from k3mlx.errors import ModelFilesError

from .findings import Findings
from .quantized import QuantizedInfo
from .safetensors import TensorInfo

DERIVED = "derived"  # the dtype of a tensor that has no bits of its own: its values are computed
Stored = TensorInfo | QuantizedInfo


class StoredTensors:
    """Tensors by stored name; each that is asked for is crossed off, `left` are the others."""

    def __init__(self, infos: Mapping[str, TensorInfo], findings: Findings) -> None:
        self._infos = infos
        self._findings = findings
        self.left = set(infos)

    def find(
        self, stored: str, shape: tuple[int, ...], short: tuple[int, ...] | None = None
    ) -> Stored | None:
        """The tensor of that name and shape, plain or quantised; None and a finding if it is not so."""
        stem = stored.removesuffix(".weight")
        parts = {
            p: self._infos[n] for p in ("weight", "scales", "biases") if (n := f"{stem}.{p}") in self._infos
        }
        self.left -= {f"{stem}.{part}" for part in parts} | {stored}
        info = self._infos.get(stored)
        if info is None:
            self._findings.add(f"tensor '{stored}' is missing, expected {list(shape)}")
            return None
        if "scales" not in parts:
            if info.shape not in (shape, short):
                self._findings.add(
                    f"{info.path}: tensor '{stored}' has shape {list(info.shape)}, expected {list(shape)}"
                )
            return info
        try:
            found = QuantizedInfo.find(parts, shape[-1])
        except ModelFilesError as error:
            self._findings.add(str(error))
            return None
        if found.shape != shape:
            self._findings.add(
                f"{info.path}: tensor '{stored}' has shape {list(found.shape)}, expected {list(shape)}"
            )
        return found

    def report_surplus(self, names: Iterable[str]) -> None:
        """A finding for each of these tensors: nothing asked for it."""
        for name in sorted(names):
            self._findings.add(
                f"{self._infos[name].path}: tensor '{name}' is surplus: the configuration calls for no such tensor"
            )


def derived(name: str, shape: tuple[int, ...], sources: Iterable[Stored]) -> TensorInfo:
    """What stands for a tensor that is computed from others: its bytes are theirs, its place is the first's."""
    infos: list[TensorInfo] = []
    for source in sources:
        if isinstance(source, QuantizedInfo):
            infos += [part for part in (source.codes, source.scales, source.biases) if part is not None]
        else:
            infos.append(source)
    return infos[0]._replace(name=name, dtype=DERIVED, shape=shape, nbytes=sum(info.nbytes for info in infos))
