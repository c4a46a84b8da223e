"""A checkpoint that need not exist: names, shapes and bytes of every tensor, as the engine's plan asks for them.

Dense matrices may be thought of as `k3mlx convert` would store them. Nothing of it can be read.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from k3mlx.checkpoint.census import Census
from k3mlx.checkpoint.names import TensorSpec, dense_specs, expert_parts
from k3mlx.checkpoint.quantized import WORD_BITS, QuantizedInfo
from k3mlx.checkpoint.safetensors import TensorInfo
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.stored import derived
from k3mlx.config import ModelConfig
from k3mlx.convert.formats import Format, Formats, dense_files

NOWHERE = Path("not-downloaded.safetensors")


class PaperCheckpoint(Checkpoint):
    """The checkpoint of a configuration, its dense matrices in `formats` (None: as released)."""

    def __init__(self, config: ModelConfig, formats: Formats | None = None) -> None:
        quantized = {} if formats is None else _quantized(config, formats)
        tensors = {
            spec.name: derived(spec.name, spec.shape, [quantized[spec.name]])
            if spec.name in quantized
            else _info(spec)
            for spec in dense_specs(config)
        }
        super().__init__(NOWHERE.parent, config, Census(tensors, {}, config.experts_are_mxfp4, ()))
        self.quantized = MappingProxyType(quantized)
        self._expert: dict[str, TensorInfo] = {}
        offset = 0
        for part, spec in expert_parts(config, config.experts_are_mxfp4).items():
            self._expert[part] = _info(spec)._replace(offset=offset)
            offset += spec.nbytes

    def expert_tensors(self, layer: int, expert: int) -> dict[str, TensorInfo]:
        """The tensors of any expert, one after the other, as they lie in the released files."""
        return self._expert


def _quantized(config: ModelConfig, formats: Formats) -> dict[str, QuantizedInfo]:
    found = {}
    for _, kind, specs in dense_files(config):
        for spec in specs:
            format = formats.of(spec, kind)
            if format is not None:
                found[spec.name] = _codes(spec, format)
    return found


def _codes(spec: TensorSpec, format: Format) -> QuantizedInfo:
    """A matrix [out, in] as affine codes, its scales and biases in bf16."""
    *rows, columns = spec.shape
    numbers = TensorSpec(spec.name, (*rows, columns // format.group_size), ("BF16",))
    codes = TensorSpec(spec.name, (*rows, columns * format.bits // WORD_BITS), ("U32",))
    return QuantizedInfo(
        spec.shape, _info(codes), _info(numbers), _info(numbers), format.bits, format.group_size, "affine"
    )


def _info(spec: TensorSpec) -> TensorInfo:
    return TensorInfo(spec.name, spec.dtypes[0], spec.shape, NOWHERE, 0, spec.nbytes)
