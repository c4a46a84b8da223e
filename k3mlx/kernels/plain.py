"""The kernels' work in plain MLX operations: the path behind every launch, on any MLX device.

Owns the same functions as the kernels, with the same arguments and results. Arithmetic is float32, results
have the activations' dtype. The rules are those of `k3mlx/reference`, which is the law.
"""

from __future__ import annotations

import mlx.core as mx

from k3mlx.stages import Probe, no_probe

BLOCK = 16  # rows of a sub-block: with g >= -5 no exponent of a sub-block leaves the range of float32


def _l2_norm(x: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True) + eps)


def short_conv(u: mx.array, window: mx.array, taps: mx.array) -> tuple[mx.array, mx.array]:
    """Causal depthwise convolution and SiLU: u [B, T, P], window [B, W-1, P], taps [P, W].

    Returns (activated [B, T, P] float32, new window [B, W-1, P]). Source: model specification §2.3.1.
    """
    samples = mx.concatenate([window, u], axis=1)
    tokens, taps = u.shape[1], taps.astype(mx.float32)
    out = mx.zeros(u.shape, mx.float32)
    for tap in range(taps.shape[1]):
        out = out + samples[:, tap : tap + tokens].astype(mx.float32) * taps[:, tap]
    return out * mx.sigmoid(out), samples[:, tokens:]


def kda_step(
    q: mx.array, k: mx.array, v: mx.array, z: mx.array, b: mx.array, gate: mx.array,
    windows: mx.array, state: mx.array, taps: mx.array, A_log: mx.array, dt_bias: mx.array, o_norm: mx.array,
    lower_bound: float, eps: float, l2_eps: float, probe: Probe = no_probe,
) -> tuple[mx.array, mx.array, mx.array]:  # fmt: skip
    """A KDA layer between its projections; shapes as `Kernels.kda_step`. Source: §2.3."""
    batch, tokens, heads = b.shape
    width = o_norm.shape[0]
    split = (batch, tokens, heads, width)
    dtype = q.dtype
    activated, fresh = zip(
        *(short_conv(u, windows[:, n], taps[n]) for n, u in enumerate((q, k, v))), strict=True
    )
    q, k, v = (probe(f"{stream}_conv", a.reshape(split)) for stream, a in zip("qkv", activated, strict=True))
    windows = probe("windows", mx.stack(list(fresh), axis=1))
    q = probe("q_unit", _l2_norm(q, l2_eps) * width**-0.5)
    k = probe("k_unit", _l2_norm(k, l2_eps))
    shifted = z.astype(mx.float32).reshape(split) + dt_bias.astype(mx.float32).reshape(heads, width)
    g = probe("g", lower_bound * mx.sigmoid(mx.exp(A_log.astype(mx.float32))[:, None] * shifted))
    beta = probe("beta", mx.sigmoid(b.astype(mx.float32)))
    # heads before tokens: [B, H, T, D] and beta [B, H, T, 1]
    q, k, v, g = (a.transpose(0, 2, 1, 3) for a in (q, k, v, g))
    beta = beta.transpose(0, 2, 1)[..., None]
    if tokens < BLOCK:
        o, state = _recurrent(q, k, v, g, beta, state)
    else:
        o, state = _blocks(q, k, v, g, beta, state)
    o, state = probe("o", o.transpose(0, 2, 1, 3)), probe("state", state)
    o = o * mx.rsqrt(o.square().mean(axis=-1, keepdims=True) + eps) * o_norm.astype(mx.float32)
    y = o * mx.sigmoid(gate.astype(mx.float32).reshape(split))
    return probe("gated", y.reshape(batch, tokens, heads * width).astype(dtype)), windows, state


def _recurrent(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The delta rule token by token; q, k, g [B, H, T, Dk], v [B, H, T, Dv], state [B, H, Dk, Dv] (§2.3.5)."""
    alpha, out = mx.exp(g), []
    for t in range(q.shape[2]):
        row = slice(t, t + 1)
        state = alpha[:, :, t, :, None] * state
        error = beta[:, :, row] * (v[:, :, row] - k[:, :, row] @ state)  # [B, H, 1, Dv]
        state = state + k[:, :, t, :, None] * error
        out.append(q[:, :, row] @ state)
    return mx.concatenate(out, axis=2), state


def _blocks(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The same in blocks of BLOCK tokens: matrix products and one triangular solve a block (§2.4).

    Decays inside a block are taken relative to its middle row, so exponents stay within 5 * BLOCK / 2.
    """
    out = []
    for i0 in range(0, q.shape[2], BLOCK):
        rows = slice(i0, min(i0 + BLOCK, q.shape[2]))
        k_rows, q_rows = k[:, :, rows], q[:, :, rows]
        within = mx.cumsum(g[:, :, rows], axis=2)  # inclusive log decay from the block's start
        count = within.shape[2]
        middle = within[:, :, count // 2 : count // 2 + 1]
        total = within[:, :, count - 1 : count]
        grow = mx.exp(within - middle)
        k_right = (mx.exp(middle - within) * k_rows).swapaxes(-1, -2)
        m = beta[:, :, rows] * mx.tril((grow * k_rows) @ k_right, -1)
        decay = mx.exp(within)
        error = _solve_unit_lower(m, beta[:, :, rows] * (v[:, :, rows] - (decay * k_rows) @ state))
        out.append((decay * q_rows) @ state + mx.tril((grow * q_rows) @ k_right) @ error)
        state = mx.exp(total).swapaxes(-1, -2) * state
        state = state + (mx.exp(total - within) * k_rows).swapaxes(-1, -2) @ error
    return mx.concatenate(out, axis=2), state


def _solve_unit_lower(m: mx.array, rhs: mx.array) -> mx.array:
    """(I + m) x = rhs by forward substitution, m strictly lower; a power series would lose everything."""
    x = rhs[..., :1, :]
    for i in range(1, rhs.shape[-2]):
        row = rhs[..., i : i + 1, :] - m[..., i : i + 1, :i] @ x
        x = mx.concatenate([x, row], axis=-2)
    return x


def _row_sum(x: mx.array) -> mx.array:
    """Sum over the last axis in two stages: on the CPU one float32 sum over thousands loses a digit."""
    width = x.shape[-1]
    if width % 64:
        return x.sum(axis=-1)
    return x.reshape(*x.shape[:-1], width // 64, 64).sum(axis=-1).sum(axis=-1)


def attn_res_mix(
    blocks: mx.array | None,
    partial: mx.array,
    norm: mx.array,
    query: mx.array,
    eps: float,
    out_norm: mx.array,
) -> tuple[mx.array, mx.array]:
    """Depth mix and the RMSNorm that follows; shapes as `Kernels.attn_res_mix`. Source: §2.2."""
    dtype = partial.dtype
    sources = partial[None] if blocks is None else mx.concatenate([blocks, partial[None]])
    sources = sources.astype(mx.float32)  # [N + 1, T, D]
    direction = norm.astype(mx.float32) * query.astype(mx.float32)
    width = partial.shape[-1]
    scores = _row_sum(sources * direction) * mx.rsqrt(_row_sum(sources.square()) / width + eps)
    weights = mx.softmax(scores, axis=0)[..., None]
    mixed = (weights * sources).sum(axis=0)
    scale = mx.rsqrt(_row_sum(mixed.square())[..., None] / width + eps)
    normed = mixed * scale * out_norm.astype(mx.float32)
    return mixed.astype(dtype), normed.astype(dtype)


def router_logits(x: mx.array, gate: mx.array) -> mx.array:
    """x [T, D], gate [E, D] -> [T, E] in float32 whatever the dtypes. Source: §2.6.2."""
    return x.astype(mx.float32) @ gate.astype(mx.float32).T


def select_topk(
    logits: mx.array, bias: mx.array, k: int, scaling: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Choice and weights of k experts from logits [T, E]; results as `Kernels.route_topk`. Source: §2.6.2."""
    scores = mx.sigmoid(logits)
    biased = scores + bias.astype(mx.float32)
    nan = mx.isnan(biased)
    # NaN goes last; equal scores keep the order of their ids where the sort is stable, as on the CPU
    order = mx.argsort(mx.where(nan, mx.inf, -biased), axis=-1)
    ids = order[:, :k].astype(mx.int32)
    chosen = mx.take_along_axis(scores, ids, axis=-1)
    weights = chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20) * scaling
    return ids, weights, nan.any(axis=-1).astype(mx.int32)
