"""The Kimi K3 text model in torch, for training: every formula of the specification's section 2, chunkwise KDA.

Functions over a flat dictionary of parameters under their checkpoint names (routed experts stacked as
`…experts.w1` [E, F, Λ] and so on). Linear maps run in `dtype`, everything else in float32. Owns no data,
no optimiser, no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from k3mlx.checkpoint.names import TensorSpec, dense_specs, expert_prefix
from k3mlx.config import ModelConfig

CHUNK = 32
Params = dict[str, Tensor]


def stacked_experts(config: ModelConfig, layer: int) -> dict[str, tuple[int, int, int]]:
    """Names and shapes of the stacked expert matrices of one layer."""
    prefix = expert_prefix(layer, 0).removesuffix("0.")
    count, inner, latent = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
    shapes = {"w1": (count, inner, latent), "w2": (count, latent, inner), "w3": (count, inner, latent)}
    return {prefix + name: shape for name, shape in shapes.items()}


def initial_parameters(config: ModelConfig, seed: int) -> Params:
    """Fresh float32 parameters. `A_log` holds its heads only; the padding is added on export."""
    generator = torch.Generator().manual_seed(seed)
    params = {spec.name: _initial(config, spec, generator) for spec in dense_specs(config)}
    for layer in filter(config.is_moe, range(config.num_hidden_layers)):
        for name, shape in stacked_experts(config, layer).items():
            params[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return params


def _initial(config: ModelConfig, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    name, shape = spec.name, spec.short or spec.shape
    if name.endswith(("A_log", "e_score_correction_bias", "_res_proj.weight")):
        return torch.zeros(shape)
    if name.endswith("dt_bias"):  # |g| spread evenly in the logarithm over 1e-3 to 0.5
        share = torch.exp(torch.empty(shape).uniform_(math.log(1e-3), math.log(0.5), generator=generator)) / 5
        return torch.log(share) - torch.log1p(-share)
    if name.endswith("conv1d.weight"):
        taps = torch.randn(shape, generator=generator) * 0.1
        taps[:, 0, -1] += 0.6
        return taps
    if len(shape) == 1:
        return torch.ones(shape)
    if name.endswith("embed_tokens.weight"):
        return torch.randn(shape, generator=generator) * 0.5
    gain = (
        0.5 if name.endswith(("o_proj.weight", ".down_proj.weight", "routed_expert_up_proj.weight")) else 1.0
    )
    return torch.randn(shape, generator=generator) * gain * shape[1] ** -0.5


def quantise(weight: Tensor) -> Tensor:
    """The nearest MXFP4 values along the last axis (groups of 32), straight-through gradient."""
    with torch.no_grad():
        groups = weight.reshape(*weight.shape[:-1], -1, 32)
        largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 6)))
        x = groups / scale
        a = x.abs()
        step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
        rounded = (torch.round(x / step) * step * scale).reshape(weight.shape)
    return weight + (rounded - weight).detach()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def situ(a: Tensor, b: Tensor, beta: float, linear_beta: float) -> Tensor:
    a, b = a.float(), b.float()
    return beta * torch.tanh(a / beta) * torch.sigmoid(a) * linear_beta * torch.tanh(b / linear_beta)


def mix_and_norm(sources: list[Tensor], norm: Tensor, query: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Depth mixing of the sources [B, T, D], then the sublayer's RMS norm."""
    if len(sources) == 1:
        return rms(sources[0], weight, eps)
    c = norm * query[0]
    scores = [(v * c).sum(-1) * torch.rsqrt((v * v).mean(-1) + eps) for v in sources]
    shares = torch.softmax(torch.stack(scores, -1), -1)
    mixed = sum(shares[..., j : j + 1] * v for j, v in enumerate(sources))
    return rms(mixed, weight, eps)


class _Inverse(torch.autograd.Function):
    """(I + M)^-1 of strictly lower M [..., C, C] by merging inverted diagonal blocks of 1, 2, 4, … rows."""

    @staticmethod
    def forward(ctx, m: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        size = m.shape[-1]
        row = torch.arange(size, device=m.device)
        inverse = torch.eye(size, device=m.device, dtype=m.dtype).expand_as(m)
        block = 1
        while block < size:
            below = (row[:, None] // block % 2 == 1) & (row[:, None] // block == row[None, :] // block + 1)
            corner = torch.where(below, m, 0.0)
            inverse = inverse - inverse @ corner @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        transposed = inverse.mT
        return -(transposed @ grad @ transposed)


class _Scan(torch.autograd.Function):
    """S_0 = 0, S_{t+1} = A_t S_t + B_t; A, B [N, batch, d, d]; returns S_0 … S_{N-1}."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        states = torch.zeros_like(b)
        for t in range(len(a) - 1):
            torch.baddbmm(b[t], a[t], states[t], out=states[t + 1])
        ctx.save_for_backward(a, states)
        return states

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        a, states = ctx.saved_tensors
        flow = torch.zeros_like(grad)  # flow[t] = dL/dS_{t+1}
        for t in range(len(a) - 2, -1, -1):
            torch.baddbmm(grad[t + 1], a[t + 1].mT, flow[t + 1], out=flow[t])
        return flow @ states.mT, flow


def kda_inputs(
    x: Tensor,
    weights: list[Tensor],
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    config: ModelConfig,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Everything of a KDA layer up to the triangular solve, chunked as [chunks, B·H, C, ·]."""
    batch, length, _ = x.shape
    heads, width = config.kda_num_heads, config.kda_head_dim
    inner = heads * width
    chunks = length // CHUNK
    q_w, k_w, v_w, g_w, fa_w, fb_w, b_w = weights
    x = x.to(dtype)
    joined = F.linear(x, torch.cat([q_w, k_w, v_w, g_w, fa_w, b_w]).to(dtype))
    u, gate, low, b = joined.split([3 * inner, inner, fa_w.shape[0], heads], -1)
    padded = F.pad(u.float(), (0, 0, taps.shape[-1] - 1, 0))
    c = sum(padded[:, j : j + length] * taps[:, 0, j] for j in range(taps.shape[-1]))
    q, k, v = (part.view(batch, length, heads, width) for part in F.silu(c).split(inner, -1))
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + config.l2_norm_eps) * width**-0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + config.l2_norm_eps)
    z = F.linear(low, fb_w.to(dtype)).float() + dt_bias
    z = z.view(batch, length, heads, width) * torch.exp(a_log)[:, None]
    g = config.gate_lower_bound * torch.sigmoid(z)
    beta = torch.sigmoid(b.float())

    def chunked(t: Tensor) -> Tensor:
        t = t.reshape(batch, chunks, CHUNK, heads, -1).permute(1, 0, 3, 2, 4)
        return t.reshape(chunks, batch * heads, CHUNK, -1)

    q, k, v, g, beta = map(chunked, (q, k, v, g, beta))
    total = torch.cumsum(g, 2)
    reference = total[:, :, CHUNK // 2 : CHUNK // 2 + 1]
    up, down = torch.exp(total - reference), torch.exp(reference - total)
    k_down = k * down
    row = torch.arange(CHUNK, device=x.device)
    # masked before anything else touches the product: its upper triangle overflows
    m = torch.where(row[:, None] > row, (k * up) @ k_down.mT, 0.0) * beta
    r = torch.where(row[:, None] >= row, (q * up) @ k_down.mT, 0.0)
    decay = torch.exp(total)
    last = total[:, :, -1:]
    right = torch.cat([beta * decay * k, beta * v], -1)
    return m, r, right, decay * q, torch.exp(last - total) * k, torch.exp(last[:, :, 0]), gate


def kda_transitions(
    inverse: Tensor, right: Tensor, k_end: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, Y and the affine map of each chunk's state, S ↦ A S + B."""
    width = keep.shape[-1]
    x, y = (inverse @ right).split([width, right.shape[-1] - width], -1)
    moved = k_end.mT @ torch.cat([-x, y], -1)
    a, b = moved.split([width, right.shape[-1] - width], -1)
    return x, y, a + torch.diag_embed(keep), b.contiguous()


def kda_output(
    x: Tensor, y: Tensor, r: Tensor, q_decayed: Tensor, states: Tensor, gate: Tensor, o_norm: Tensor, o_w: Tensor,
    config: ModelConfig, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Read-out of every chunk, head norm, gate, output projection."""
    batch, length, inner = gate.shape
    heads, width = config.kda_num_heads, config.kda_head_dim
    written = y - x @ states
    o = q_decayed @ states + r @ written
    o = (
        o.view(length // CHUNK, batch, heads, CHUNK, width)
        .permute(1, 0, 3, 2, 4)
        .reshape(batch, length, heads, width)
    )
    o = rms(o, o_norm, config.rms_norm_eps) * torch.sigmoid(gate.float()).view(batch, length, heads, width)
    return F.linear(o.reshape(batch, length, inner).to(dtype), o_w.to(dtype)).float()


def mla(x: Tensor, weights: list[Tensor], config: ModelConfig, dtype: torch.dtype) -> Tensor:
    qa_w, qa_norm, qb_w, kva_w, kva_norm, kvb_w, g_w, o_w = weights
    batch, length, _ = x.shape
    heads, n, e, m = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    x = x.to(dtype)
    low, kv, gate = F.linear(x, torch.cat([qa_w, kva_w, g_w]).to(dtype)).split(
        [qa_w.shape[0], kva_w.shape[0], g_w.shape[0]], -1
    )
    q = F.linear(rms(low, qa_norm, config.mla_norm_eps).to(dtype), qb_w.to(dtype)).view(
        batch, length, heads, n + e
    )
    latent, ext = kv.split([config.kv_lora_rank, e], -1)
    expanded = F.linear(rms(latent, kva_norm, config.mla_norm_eps).to(dtype), kvb_w.to(dtype)).view(
        batch, length, heads, n + m
    )
    k_nope, v = expanded.split([n, m], -1)
    k = torch.cat([k_nope, ext[:, :, None].expand(-1, -1, heads, -1)], -1)
    v = F.pad(v, (0, n + e - m))
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    o = o.transpose(1, 2)[..., :m].reshape(batch, length, heads * m)
    return F.linear(o * torch.sigmoid(gate.float()).to(dtype), o_w.to(dtype)).float()


def gated_mlp(
    x: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor, config: ModelConfig, dtype: torch.dtype
) -> Tensor:
    a, b = F.linear(x.to(dtype), torch.cat([gate_w, up_w]).to(dtype)).chunk(2, -1)
    hidden = situ(a, b, config.activation_situ_beta, config.activation_situ_linear_beta)
    return F.linear(hidden.to(dtype), down_w.to(dtype)).float()


def moe(x: Tensor, weights: list[Tensor], config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The latent mixture and the shared experts; also the number of tokens each expert got.

    All experts are computed and weighted, most of them by zero: at this size that is faster than gathering.
    """
    gate_w, bias, down_w, up_w, norm, w1, w2, w3, *shared = weights
    scores = torch.sigmoid(F.linear(x, gate_w))  # [B, T, E]
    choice = (scores + bias).detach()
    above = choice[..., None, :] > choice[..., :, None]
    index = torch.arange(config.num_experts, device=x.device)
    tied = (choice[..., None, :] == choice[..., :, None]) & (index < index[:, None])
    chosen = ((above | tied).sum(-1) < config.num_experts_per_token).float()
    kept = scores * chosen
    route = kept / (kept.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    latent = F.linear(x.to(dtype), down_w.to(dtype))
    a = F.linear(latent, quantise(w1).flatten(0, 1).to(dtype)).unflatten(-1, w1.shape[:2])
    b = F.linear(latent, quantise(w3).flatten(0, 1).to(dtype)).unflatten(-1, w1.shape[:2])
    hidden = situ(a, b, config.activation_situ_beta, config.activation_situ_linear_beta) * route[..., None]
    down = quantise(w2).permute(1, 0, 2).flatten(1)  # [Λ, E·F]
    mixed = F.linear(hidden.flatten(-2).to(dtype), down.to(dtype))
    routed = F.linear(rms(mixed, norm, config.rms_norm_eps).to(dtype), up_w.to(dtype)).float()
    return routed + gated_mlp(x, *shared, config, dtype), chosen.flatten(0, -2).sum(0)


class Network:
    """Runs the functions above over a parameter dictionary; `compiled` compiles them with torch.compile."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, compiled: bool = False) -> None:
        self.config, self.dtype = config, dtype
        wrap: Callable = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._mix, self._inputs, self._transitions = (
            wrap(mix_and_norm),
            wrap(kda_inputs),
            wrap(kda_transitions),
        )
        self._output, self._mla, self._mlp, self._moe = (
            wrap(kda_output),
            wrap(mla),
            wrap(gated_mlp),
            wrap(moe),
        )

    def __call__(self, params: Params, ids: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Final hidden states [B, T, D] before the head (T a multiple of 32) and expert loads by layer."""
        config = self.config
        partial = F.embedding(ids, params["model.embed_tokens.weight"])
        blocks: list[Tensor] = []
        loads: dict[int, Tensor] = {}
        for layer in range(config.num_hidden_layers):
            p = f"model.layers.{layer}."

            x = self._mixed(params, p, "self_attention_res", "input_layernorm", [*blocks, partial])
            restart = layer % config.attn_res_block_size == 0
            if restart:
                blocks.append(partial)
            attention = self._attention(params, layer, x)
            partial = attention if restart else partial + attention
            x = self._mixed(params, p, "mlp_res", "post_attention_layernorm", [*blocks, partial])
            if config.is_moe(layer):
                out, loads[layer] = self._moe(x, moe_weights(params, layer), config, self.dtype)
            else:
                out = self._mlp(
                    x,
                    *(params[f"{p}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")),
                    config,
                    self.dtype,
                )
            partial = partial + out
        return self._mixed(params, "model.", "output_attn_res", "norm", [*blocks, partial]), loads

    def _mixed(self, params: Params, prefix: str, site: str, norm: str, sources: list[Tensor]) -> Tensor:
        names = (f"{site}_norm.weight", f"{site}_proj.weight", f"{norm}.weight")
        return self._mix(sources, *(params[prefix + name] for name in names), self.config.rms_norm_eps)

    def _attention(self, params: Params, layer: int, x: Tensor) -> Tensor:
        p = f"model.layers.{layer}.self_attn."
        config, dtype = self.config, self.dtype
        if config.layer_kinds[layer] == "mla":
            names = (
                "q_a_proj",
                "q_a_layernorm",
                "q_b_proj",
                "kv_a_proj_with_mqa",
                "kv_a_layernorm",
                "kv_b_proj",
                "g_proj",
                "o_proj",
            )
            return self._mla(x, [params[f"{p}{name}.weight"] for name in names], config, dtype)
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "f_b_proj", "b_proj")
        taps = torch.cat([params[f"{p}{s}_conv1d.weight"] for s in "qkv"])
        weights = [params[f"{p}{name}.weight"] for name in names]
        m, r, right, q_decayed, k_end, keep, gate = self._inputs(
            x, weights, taps, params[p + "A_log"], params[p + "dt_bias"], config, dtype
        )
        x_part, y, a, b = self._transitions(_Inverse.apply(m), right, k_end, keep)
        states = _Scan.apply(a, b)
        return self._output(
            x_part,
            y,
            r,
            q_decayed,
            states,
            gate,
            params[p + "o_norm.weight"],
            params[p + "o_proj.weight"],
            config,
            dtype,
        )

    def logits(self, params: Params, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.dtype), params["lm_head.weight"].to(self.dtype)).float()


def moe_weights(params: Params, layer: int) -> list[Tensor]:
    """The parameters `moe` takes, in its order."""
    p = f"model.layers.{layer}.block_sparse_moe."
    names = (
        "gate.weight", "gate.e_score_correction_bias", "routed_expert_down_proj.weight", "routed_expert_up_proj.weight",
        "routed_expert_norm.weight", "experts.w1", "experts.w2", "experts.w3", "shared_experts.gate_proj.weight",
        "shared_experts.up_proj.weight", "shared_experts.down_proj.weight",
    )  # fmt: skip
    return [params[p + name] for name in names]
