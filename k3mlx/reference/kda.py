"""Kimi delta attention: short convolutions, decay gate, delta-rule recurrence, gated output.

Owns the arithmetic of a KDA layer between its input and output projections, in the sequential and
in the chunkwise form. The projections themselves are in `model.py`. A state is `[H, Dk, Dv]`, key
channel first. Source: model specification §2.3 and §2.4.
"""

import numpy as np

from k3mlx.stages import Probe, no_probe

from .ops import Array, l2_norm, rms_norm, sigmoid, silu

CHUNK = 64  # tokens per chunk of the parallel form
BLOCK = 16  # rows per sub-block: with g >= -5 no exponent of a sub-block leaves the range of float32


def short_conv(u: Array, window: Array, taps: Array) -> tuple[Array, Array]:
    """Causal depthwise convolution followed by SiLU.

    u [T, P] new samples; window [W-1, P] the samples before them, oldest first (zeros at the start
    of a sequence); taps [P, W], the last tap multiplies the newest sample.
    Returns (activated [T, P], new window [W-1, P]). Source: §2.3.1.
    """
    width = taps.shape[1]
    samples = np.concatenate([window, u])  # [W-1+T, P]
    tokens = len(u)
    out = samples[:tokens] * taps[:, 0]
    for tap in range(1, width):
        out += samples[tap : tap + tokens] * taps[:, tap]
    return silu(out), samples[tokens:]


def decay_gate(z: Array, A_log: Array, dt_bias: Array, lower_bound: float) -> Array:
    """Natural logarithm of each key channel's retention, in (lower_bound, 0).

    z [T, H, Dk] output of the low-rank projection; A_log [H]; dt_bias [H, Dk] -> g [T, H, Dk].
    g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias)). Source: §2.3.4.
    """
    return lower_bound * sigmoid(np.exp(A_log)[:, None] * (z + dt_bias))


def kda_recurrent(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The delta rule token by token: decay, read with k, write the correction, read with q.

    q, k, g [T, H, Dk]; v [T, H, Dv]; beta [T, H]; state [H, Dk, Dv]; q and k already normalised and
    scaled. Returns (o [T, H, Dv], new state); the given state is left untouched. Source: §2.3.5.
    """
    out = np.empty_like(v)
    alpha = np.exp(g)
    for t in range(len(q)):
        state = alpha[t][:, :, None] * state  # a new array: the caller's state stays as it was
        error = beta[t][:, None] * (v[t] - (k[t][:, None, :] @ state)[:, 0])  # [H, Dv]
        state += k[t][:, :, None] * error[:, None, :]
        out[t] = (q[t][:, None, :] @ state)[:, 0]
    return out, state


def kda_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, chunk: int = CHUNK
) -> tuple[Array, Array]:
    """The same recurrence in parallel over chunks of tokens: matrix products and a triangular solve.

    Arguments and results as `kda_recurrent`. Equal to it up to rounding for any g in [-5, 0].
    Source: §2.4.
    """
    q, k, v, g = (np.ascontiguousarray(a.transpose(1, 0, 2)) for a in (q, k, v, g))  # [H, T, .]
    beta = np.ascontiguousarray(beta.T)[:, :, None]  # [H, T, 1]
    out = np.empty_like(v)
    for start in range(0, q.shape[1], chunk):
        rows = slice(start, start + chunk)
        out[:, rows], state = _one_chunk(q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], state)
    return out.transpose(1, 0, 2), state


def _one_chunk(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """One chunk, heads first. All decays are built from sums inside sub-blocks of BLOCK rows and
    from block totals, so that every exponent is a short sum (accurate) and, across blocks, at most
    0 (no overflow); exp(-G) is never formed over a chunk."""
    heads, tokens, key_width = k.shape
    out = np.empty_like(v)
    error = np.empty_like(v)  # rows e_i of the correction
    since_start = np.zeros((heads, 1, key_width), g.dtype)  # log decay from chunk start to block start
    until_now = np.zeros_like(g)  # for each earlier row j: log decay from j to the current block start
    for i0 in range(0, tokens, BLOCK):
        i1 = min(i0 + BLOCK, tokens)
        rows, earlier = slice(i0, i1), slice(0, i0)
        within = np.cumsum(g[:, rows], axis=1)  # inclusive, from the block start
        k_in, q_in = np.exp(within) * k[:, rows], np.exp(within) * q[:, rows]

        # what the block's rows see of the state at the chunk start and of earlier blocks
        decay = np.exp(since_start)
        seen_k, seen_q = (k_in * decay) @ state, (q_in * decay) @ state  # [H, rows, Dv]
        if i0:
            k_out = np.exp(until_now[:, earlier]) * k[:, earlier]  # exponents <= 0
            seen_k += (k_in @ k_out.transpose(0, 2, 1)) @ error[:, earlier]
            seen_q += (q_in @ k_out.transpose(0, 2, 1)) @ error[:, earlier]

        # inside the block: decays relative to its middle row stay within exp(+-5 * BLOCK / 2)
        middle = within[:, (i1 - i0) // 2, None]
        k_right = (np.exp(middle - within) * k[:, rows]).transpose(0, 2, 1)
        m = beta[:, rows] * np.tril((np.exp(within - middle) * k[:, rows]) @ k_right, -1)
        r = np.tril((np.exp(within - middle) * q[:, rows]) @ k_right)

        error[:, rows] = _solve_unit_lower(m, beta[:, rows] * (v[:, rows] - seen_k))
        out[:, rows] = seen_q + r @ error[:, rows]

        total = within[:, -1:]
        until_now[:, earlier] += total
        until_now[:, rows] = total - within
        since_start = since_start + total
    new_state = np.exp(since_start).transpose(0, 2, 1) * state
    new_state += (np.exp(until_now) * k).transpose(0, 2, 1) @ error
    return out, new_state


def _solve_unit_lower(m: Array, rhs: Array) -> Array:
    """Solve (I + m) x = rhs by forward substitution; m [H, n, n] strictly lower, rhs [H, n, Dv].

    A product expansion of the inverse would lose everything for near-parallel keys.
    """
    x = rhs.copy()
    for i in range(1, x.shape[1]):
        x[:, i] -= (m[:, i, None, :i] @ x[:, :i])[:, 0]
    return x


def kda_step(
    q: Array,
    k: Array,
    v: Array,
    z: Array,
    b: Array,
    gate: Array,
    windows: Array,
    state: Array,
    taps: Array,
    A_log: Array,
    dt_bias: Array,
    o_norm: Array,
    lower_bound: float,
    eps: float,
    l2_eps: float,
    probe: Probe = no_probe,
) -> tuple[Array, Array, Array]:
    """Everything of a KDA layer between its input projections and its output projection.

    Raw projections of T new tokens: q, k, v, z, gate [T, H*D], b [T, H]; z is the low-rank decay
    projection before `dt_bias`. State: windows [3, W-1, H*D] of q, k, v, oldest row first; state
    [H, D, D]. Weights: taps [3, H*D, W], A_log [H], dt_bias [H*D], o_norm [D].
    Returns (gated output [T, H*D], new windows, new state); inputs are left untouched. One chunk or
    less runs in the sequential form, more in the chunkwise form. Source: §2.3.
    """
    tokens, heads = b.shape
    width = o_norm.shape[0]
    activated, new_windows = zip(
        *(short_conv(u, w, t) for u, w, t in zip((q, k, v), windows, taps, strict=True)), strict=True
    )
    q, k, v = (a.reshape(tokens, heads, width) for a in activated)
    q, k, v = (probe(f"{stream}_conv", a) for stream, a in zip("qkv", (q, k, v), strict=True))
    windows = probe("windows", np.stack(new_windows))
    g = decay_gate(z.reshape(tokens, heads, width), A_log, dt_bias.reshape(heads, width), lower_bound)
    g, beta = probe("g", g), probe("beta", sigmoid(b))
    q = probe("q_unit", l2_norm(q, l2_eps) * q.dtype.type(width**-0.5))
    k = probe("k_unit", l2_norm(k, l2_eps))
    recurrence = kda_recurrent if tokens < BLOCK else kda_chunk
    o, state = recurrence(q, k, v, g, beta, state)
    o, state = probe("o", o), probe("state", state)
    y = rms_norm(o, o_norm, eps) * sigmoid(gate.reshape(tokens, heads, width))
    return probe("gated", y.reshape(tokens, heads * width)), windows, state
