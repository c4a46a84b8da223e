"""flash-linear-attention beside our KDA kernels on an NVIDIA GPU, in one run. Needs CuPy, PyTorch and
flash-linear-attention (`flash-linear-attention` and `fla-core` from PyPI).

    python -m tests.kernels.gpu_peer             one token, and a prompt of 2048

Both sides do a layer of the released model between its projections: convolutions, SiLU, norms of q and k, gates and
the delta rule, bfloat16 activations, float32 state; ours does the output norm and gate too, theirs does not.
Each is a graph, replayed in turns with the other; a token's launches rotate through 16 sets of buffers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch
from fla.modules import ShortConvolution
from fla.ops.kda import chunk_kda, fused_recurrent_kda

from k3mlx.kernels.cases import kda_case

from .gpu import _copies

HEADS, WIDTH, CONV = 96, 128, 4
ROUNDS = 15


class Peer:
    """Convolutions and delta rule of one layer; a call is one pass over `tokens` tokens with its own buffers."""

    def __init__(self, tokens: int) -> None:
        channels, like = HEADS * WIDTH, {"device": "cuda", "dtype": torch.bfloat16}
        self.kernel = chunk_kda if tokens > 64 else fused_recurrent_kda
        self.convolutions = [
            ShortConvolution(channels, CONV, bias=False, activation="silu").to(**like) for _ in "qkv"
        ]
        self.inputs = [torch.randn(1, tokens, channels, **like) for _ in "qkvg"]
        self.windows = [torch.randn(1, channels, CONV, **like) for _ in "qkv"]
        self.beta = torch.randn(1, tokens, HEADS, **like)
        self.state = torch.randn(1, HEADS, WIDTH, WIDTH, device="cuda")
        self.A_log = torch.zeros(HEADS, device="cuda")
        self.dt_bias = torch.randn(channels, device="cuda")
        self.safe = {"safe_gate": True} if self.kernel is chunk_kda else {}

    def __call__(self) -> Any:
        split = (1, -1, HEADS, WIDTH)
        q, k, v = (
            conv(x=x, cache=window, output_final_state=True)[0].view(split)
            for conv, x, window in zip(self.convolutions, self.inputs, self.windows, strict=False)
        )
        return self.kernel(
            q=q, k=k, v=v, g=self.inputs[3].view(split), beta=self.beta, A_log=self.A_log, dt_bias=self.dt_bias,
            initial_state=self.state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0, state_v_first=True,
            **self.safe,
        )  # fmt: skip


def torch_graph(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    """One graph of all calls, each run before so that everything is compiled and tuned."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def cupy_graph(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    """The same for launches through CuPy, replayed on PyTorch's stream."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
    return lambda: graph.launch(cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream))


def seconds(replay: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def compare(tokens: int, sets: int) -> None:
    """Times of both in turns, medians, and the median of the ratios."""
    stem = "kda_step" if tokens <= 32 else "kda_prefill"
    begin = time.monotonic()
    with torch.inference_mode():
        theirs = torch_graph([Peer(tokens) for _ in range(sets)])
    print(f"the peer was compiled and tuned in {time.monotonic() - begin:.0f} s", flush=True)
    ours = cupy_graph(list(_copies(kda_case(stem, heads=HEADS, tokens=tokens, dtype="bfloat16"), sets, None)))
    times = np.array([(seconds(ours), seconds(theirs)) for _ in range(ROUNDS + 3)])[3:] / sets
    mine, peer = np.median(times, axis=0) * 1e6
    ratio = np.median(times[:, 0] / times[:, 1])
    print(
        f"T{tokens}: {stem} {mine:.1f} us, flash-linear-attention {peer:.1f} us, ratio {ratio:.2f}",
        flush=True,
    )


def main() -> int:
    print("device", torch.cuda.get_device_name(), "torch", torch.__version__)
    compare(1, 16)
    compare(2048, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
