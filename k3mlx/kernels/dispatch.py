"""Which path a call takes: the kernel, or the plain MLX operations behind it; and the count of both.

Owns the switches and counters of one run. What a launch looks like is in `launch.py`; what to do about a
failure that shows at evaluation is the engine's decision: it calls `disable` and builds its step again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3mlx.stages import Probe, no_probe

from . import launch as describe
from .launch import KERNELS, Array, Launch, Maker, Unsupported

STEP_TOKENS = 32  # longer inputs go through kda_prefill


@dataclass
class Counter:
    """What happened to one kernel in a run."""

    calls: int = 0
    failures: int = 0
    fallbacks: int = 0
    reason: str = ""  # why the plain path was taken, last


class Kernels:
    """The kernels of one engine.

    maker: where kernels are built, or None for the plain paths only. threads: threadgroup sizes that differ
    from the defaults, by stem (see the self-test). note: called with one line when a path falls back for a
    new reason. Not thread-safe: the thread that owns MLX owns this.
    """

    def __init__(
        self,
        maker: Maker | None,
        threads: Mapping[str, int] | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.maker = maker
        self.threads = {stem: spec.threads for stem, spec in KERNELS.items()} | dict(threads or {})
        self.counters = {stem: Counter() for stem in KERNELS}
        self.disabled: dict[str, str] = {}
        self._note = note
        self._noted: set[str] = set()
        self._built: dict[str, Any] = {}

    def disable(self, stem: str, reason: str, failed: bool = True) -> None:
        """Take the plain path for this kernel from now on; `failed` counts a failure."""
        self.disabled[stem] = reason
        self.counters[stem].failures += failed

    def disable_all(self, reason: str) -> None:
        """Plain paths only from now on, none counted as a failure of its own."""
        for stem in KERNELS:
            self.disable(stem, reason, failed=False)

    def report(self) -> list[dict[str, Any]]:
        """One row a kernel, in the form of `engine.report()["parts"]`."""
        device = self.maker.name if self.maker else "none"
        return [
            {
                "part": stem,
                "device": device,
                "kernel": "plain" if self.maker is None or stem in self.disabled else stem,
                "calls": counter.calls,
                "failures": counter.failures,
                "fallbacks": counter.fallbacks,
            }
            for stem, counter in self.counters.items()
        ]

    def kda_step(
        self, q: Array, k: Array, v: Array, z: Array, b: Array, gate: Array, windows: Array, state: Array,
        taps: Array, A_log: Array, dt_bias: Array, o_norm: Array, lower_bound: float, eps: float, l2_eps: float,
        probe: Probe = no_probe,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """Everything of a KDA layer between its input and output projections, for any number of tokens.

        q, k, v, z, gate [B, T, H*D] and b [B, T, H] raw projections, one activation dtype; z before `dt_bias`.
        windows [B, 3, W-1, H*D] of the same dtype, oldest row first; state [B, H, D, D] float32, key channel
        first. taps [3, H*D, W], A_log [H], dt_bias [H*D], o_norm [D] in any float dtype (float32 in K3).
        Returns (gated output [B, T, H*D], new windows, new state), three new arrays. One launch. `probe` sees the
        stages within, of a kernel only these three.
        Reference: `k3mlx.reference.kda.kda_step`, with a batch axis in front. Source: model specification §2.3.
        """
        if 0 in q.shape:
            return q, windows, state
        stem = "kda_step" if q.shape[1] <= STEP_TOKENS else "kda_prefill"
        arguments = (
            q, k, v, z, b, gate, windows, state, taps, A_log, dt_bias, o_norm, lower_bound, eps, l2_eps,
        )  # fmt: skip
        outputs = self._launch(stem, lambda maker, threads: describe.kda(stem, maker, threads, *arguments))
        if outputs is None:
            from . import plain

            return plain.kda_step(*arguments, probe)
        out, new_windows, new_state = outputs
        new_windows, new_state = probe("windows", new_windows), probe("state", new_state)
        return probe("gated", out), new_windows, new_state

    def attn_res_mix(
        self, blocks: Array | None, partial: Array, norm: Array, query: Array, eps: float, out_norm: Array
    ) -> tuple[Array, Array]:
        """Depth mix and the RMSNorm that follows it.

        blocks [N, T, D] frozen blocks, oldest first, or None for N = 0; partial [T, D] of the same dtype;
        norm, query, out_norm [D]. Returns (mixed [T, D], RMSNorm of the mix with out_norm and eps [T, D]).
        The norm is taken before the mix is rounded. At most 8 blocks; one launch.
        Reference: `k3mlx.reference.attn_res.attn_res_mix`. Source: model specification §2.2.
        """
        if 0 in partial.shape:
            return partial, partial
        outputs = self._launch(
            "attn_res_mix",
            lambda maker, threads: describe.attn_res_mix(
                maker, threads, blocks, partial, norm, query, eps, out_norm
            ),
        )
        if outputs is None:
            from . import plain

            return plain.attn_res_mix(blocks, partial, norm, query, eps, out_norm)
        mixed, normed = outputs
        return mixed, normed

    def route_topk(
        self, x: Array, gate: Array, bias: Array, k: int, scaling: float
    ) -> tuple[Array, Array, Array]:
        """Choose k experts for each token and weigh them.

        x [T, D] the normed input; gate [E, D]; bias [E] takes part in the choice only. Logits are taken in
        float32 by MLX's matmul; the choice is one launch. Returns (ids [T, k] int32 by falling biased score,
        equal scores by rising id; weights [T, k] float32; flags [T] int32, 1 where a biased score is NaN: the
        engine must report it, the ids of such a token are legal numbers without meaning).
        Reference: `k3mlx.reference.moe.route_topk`. Source: model specification §2.6.2.
        """
        from . import plain

        return self.select_topk(plain.router_logits(x, gate), bias, k, scaling)

    def select_topk(self, logits: Array, bias: Array, k: int, scaling: float) -> tuple[Array, Array, Array]:
        """The part of `route_topk` after the matmul: logits [T, E] float32."""
        outputs = None
        if logits.shape[0]:
            outputs = self._launch(
                "route_topk",
                lambda maker, threads: describe.route_topk(maker, threads, logits, bias, k, scaling),
            )
        if outputs is None:
            from . import plain

            return plain.select_topk(logits, bias, k, scaling)
        ids, weights, flags = outputs
        return ids, weights, flags

    def _launch(self, stem: str, build: Callable[[Maker, int], Launch]) -> list[Array] | None:
        """The outputs of one launch, or None when the plain path has to be taken (counted and noted)."""
        counter = self.counters[stem]
        if self.maker is None:
            counter.fallbacks += 1
            return None
        reason = self.disabled.get(stem, "")
        if not reason:
            try:
                launch = build(self.maker, self.threads[stem])
            except Unsupported as error:
                reason = str(error)
        if reason:
            counter.fallbacks += 1
            counter.reason = reason
            if f"{stem}: {reason}" not in self._noted:
                self._noted.add(f"{stem}: {reason}")
                self._note(f"{stem}: plain operations instead of the kernel: {reason}")
            return None
        if stem not in self._built:
            self._built[stem] = self.maker.build(KERNELS[stem])
        counter.calls += 1
        return self._built[stem](
            inputs=launch.inputs,
            template=launch.template,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=launch.output_shapes,
            output_dtypes=launch.output_dtypes,
        )
