"""`python -m tests.model.load_run FOLDER DTYPE`: load a model into MLX and print what memory that took at the most."""

import json
import sys

import mlx.core as mx

import k3mlx


def peak_memory_bytes():
    """This process's own; what getrusage gives may be the parent's."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def main(folder, dtype):
    mx.eval(mx.zeros((1,)))
    before = peak_memory_bytes()
    with k3mlx.load(folder, backend="mlx", device="cpu", dtype=dtype, expert_cache=0) as engine:
        weights = mx.get_active_memory()
        peak = peak_memory_bytes()
        session = engine.session()
        session.feed([1, 2])
    print(json.dumps({"before": before, "peak": peak, "weights": weights, "mlx_peak": mx.get_peak_memory()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
