"""Trained weights to a checkpoint with the released names: BF16 and F32 tensors, MXFP4 experts, shards and an index."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from k3mlx.checkpoint.mxfp4 import decode, encode
from k3mlx.checkpoint.names import PREFIX, dense_specs, expert_prefix
from k3mlx.checkpoint.writer import to_bf16, write_sharded
from k3mlx.config import ModelConfig, load_config

from .model import stacked_experts
from .train import shipped


def tensors(
    config: ModelConfig, weights: dict[str, torch.Tensor]
) -> Iterator[tuple[str, tuple[str, NDArray]]]:
    """Every tensor of the checkpoint as name, (dtype, array)."""
    for spec in dense_specs(config):
        values = weights[spec.name].float().numpy()
        if spec.name.endswith("A_log"):
            values = np.pad(values, (0, spec.shape[0] - len(values)))
        if values.shape != spec.shape:
            raise SystemExit(f"{spec.name} has shape {values.shape}, the configuration wants {spec.shape}")
        stored = values.astype(np.float32) if spec.dtypes[0] == "F32" else to_bf16(values)
        yield PREFIX + spec.name, (spec.dtypes[0], stored)
    for layer in filter(config.is_moe, range(config.num_hidden_layers)):
        for expert in range(config.num_experts):
            for name in stacked_experts(config, layer):
                matrix = weights[name][expert].float().numpy()
                packed, scale = encode(matrix)
                if not np.array_equal(decode(packed, scale), matrix):
                    raise SystemExit(f"{name}[{expert}] is not on the MXFP4 grid: train with quantise()")
                target = f"{PREFIX}{expert_prefix(layer, expert)}{name.rpartition('.')[2]}."
                yield f"{target}weight_packed", ("U8", packed)
                yield f"{target}weight_scale", ("U8", scale)


def average(runs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of several runs that started from the same weights, brought back to the shipped formats."""
    return shipped({name: sum(run[name].float() for run in runs) / len(runs) for name in runs[0]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--weights", type=Path, nargs="+", required=True, help="of scripts.nano.train; several are averaged"
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with config.json; receives the shards"
    )
    parser.add_argument("--shards", type=int, default=4)
    args = parser.parse_args()
    weights = average([torch.load(path, map_location="cpu") for path in args.weights])
    write_sharded(
        args.model, tensors(load_config(args.model), weights), shards=args.shards, metadata={"format": "pt"}
    )


if __name__ == "__main__":
    main()
