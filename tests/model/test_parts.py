"""Parts of the MLX model on their own: latent attention over blocks, caches, the head, weights, slots, the probe."""

import mlx.core as mx
import numpy as np
import pytest

from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.dense_reads import convert
from k3mlx.experts.slots import ALIGN
from k3mlx.experts.store import ExpertStore
from k3mlx.model import mla, moe, ops, probe
from k3mlx.model import model as whole
from k3mlx.model.ops import Quantized
from k3mlx.model.slots import ExpertBytes, MlxSlots
from k3mlx.model.state import GROWTH, LatentCache, round_up
from k3mlx.model.weights import Loader
from k3mlx.reference import mla as reference
from k3mlx.reference.moe import mix_experts
from k3mlx.reference.ops import situ_mlp
from tests.tiny import random_config, write_random_model

HEADS, NOPE, EXT, RANK, VALUE = 3, 7, 5, 11, 6


@pytest.fixture(autouse=True)
def on_the_cpu():
    with mx.stream(mx.cpu):
        yield


def latent_inputs(rng, before, tokens):
    shapes = {
        "q_nope": (tokens, HEADS, NOPE),
        "q_ext": (tokens, HEADS, EXT),
        "rows": (before + tokens, RANK + EXT),
        "U": (HEADS, NOPE, RANK),
        "O": (HEADS, VALUE, RANK),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("form", [mla.attend, mla.attend_absorbed, mla.attend_expanded])
@pytest.mark.parametrize(
    ("before", "tokens"), [(0, 1), (0, 37), (1, 1), (255, 1), (256, 1), (300, 1), (300, 23)]
)
@pytest.mark.parametrize("elements", [1 << 24, 40 * HEADS * 64])
def test_latent_attention(monkeypatch, form, before, tokens, elements):
    monkeypatch.setattr(mla, "SCORE_ELEMENTS", elements)
    monkeypatch.setattr(mla, "BLOCK_MAX", elements // 128)
    x = latent_inputs(np.random.default_rng(before + tokens), before, tokens)
    expected = reference.attend_absorbed(
        *(x[name].astype(np.float64) for name in ("q_nope", "q_ext")),
        x["rows"][:, :RANK].astype(np.float64), x["rows"][:, RANK:].astype(np.float64),
        x["U"].astype(np.float64), x["O"].astype(np.float64), 0.3,
    )  # fmt: skip
    cache = LatentCache.empty(RANK + EXT, mx.float32)
    if before:
        cache = cache.append(mx.array(x["rows"][:before]))
        filler = mx.full((GROWTH, RANK + EXT), 1e30)  # rows of another, longer timeline in the same buffer
        room = cache.buffer.rows.shape[0] - before
        cache.append(filler[:room])
    got = form(
        *(mx.array(x[name]) for name in ("q_nope", "q_ext")), cache.buffer.rows, mx.array(x["rows"][before:]),
        mx.array(x["U"]), mx.array(x["O"]), 0.3, mla.Span(cache, tokens),
    )  # fmt: skip
    np.testing.assert_allclose(np.array(got), expected, atol=2e-5)


def test_long_caches_are_seen_in_several_blocks(monkeypatch):
    monkeypatch.setattr(mla, "BLOCK_MAX", 100)
    cache = LatentCache.empty(4, mx.float32).append(mx.zeros((300, 4)))
    assert mla.Span(cache, 1).blocks(2) == [
        (0, 100),
        (100, 200),
        (200, 300),
        (300, 400),
        (400, 500),
        (500, 513),
    ]


def test_array_sizes_stay_the_same_from_token_to_token():
    cache = LatentCache.empty(4, mx.float32).append(mx.zeros((GROWTH + 1, 4)))
    totals = set()
    for _ in range(GROWTH - 1):
        totals.add(mla.Span(cache, 1).total)
        cache = cache.append(mx.zeros((1, 4)))
    assert totals == {2 * GROWTH + 1}


def test_latent_cache_never_overwrites_what_another_cache_sees():
    base = LatentCache.empty(2, mx.float32).append(mx.ones((3, 2)))
    left = base.append(mx.full((1, 2), 2.0))
    right = base.append(mx.full((2, 2), 3.0))
    long = left
    for number in range(600):
        long = long.append(mx.full((1, 2), float(number)))
        mx.eval(long.buffer.rows)
    assert long.rows()[4:, 0].tolist() == list(range(600))
    assert left.rows()[:, 0].tolist() == [1, 1, 1, 2]
    assert right.rows()[:, 0].tolist() == [1, 1, 1, 3, 3]
    assert base.rows()[:, 0].tolist() == [1, 1, 1]


def test_latent_rows_are_written_in_place():
    cache = LatentCache.empty(64, mx.float32).append(mx.zeros((5000, 64)))
    mx.eval(cache.buffer.rows)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(20):
        cache = cache.append(mx.ones((1, 64)))
        mx.eval(cache.buffer.rows)
    assert cache.length == 5020
    assert mx.get_peak_memory() - before < 100_000  # a copy of the buffer has 1.4 MB


def test_growth_is_a_steady_multiple():
    assert [round_up(n) for n in (1, GROWTH, GROWTH + 1)] == [GROWTH, GROWTH, 2 * GROWTH]


def test_head_widens_rows_block_by_block(monkeypatch):
    rng = np.random.default_rng(3)
    monkeypatch.setattr(whole, "HEAD_ELEMENTS", 10 * 17)
    w = mx.array(rng.standard_normal((33, 17)).astype(np.float32)).astype(mx.bfloat16)
    y = mx.array(rng.standard_normal((2, 17)).astype(np.float32)).astype(mx.bfloat16)
    expected = np.array(y.astype(mx.float32)).astype(np.float64) @ np.array(w.astype(mx.float32)).T
    blocks = []
    got = whole.head(y, w, blocks.extend)
    assert [block.shape for block in blocks] == [(2, 10), (2, 10), (2, 10), (2, 3)]
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), expected, atol=1e-5)


def test_situ_mlp_in_bfloat16_is_float32_inside():
    rng = np.random.default_rng(4)
    x, gate, up, down = (
        mx.array(rng.standard_normal(s).astype(np.float32)).astype(mx.bfloat16)
        for s in ((3, 40), (24, 40), (24, 40), (40, 24))
    )
    arrays = [np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, gate, up, down)]
    expected = situ_mlp(*arrays, 4.0, 25.0)
    got = ops.situ_mlp(x, gate, up, down, 4.0, 25.0)
    assert got.dtype == mx.bfloat16
    error = np.abs(np.array(got.astype(mx.float32)) - expected).max()
    assert error <= 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("stored", ["BF16", "F32"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("in_place", [True, False])
def test_weights_have_the_stored_values(tmp_path, stored, dtype, in_place):
    rng = np.random.default_rng(6)
    write_random_model(tmp_path, random_config(rng, num_hidden_layers=4), rng, dtype=stored)
    with Checkpoint.open(tmp_path) as checkpoint:
        loader = Loader(checkpoint, dtype, in_place)
        kept = {"taps", "A_log", "dt_bias", "o_norm", "gate.e_score_correction_bias"}
        for n in range(4):
            layer = loader.layer(n)
            prefix = f"model.layers.{n}."
            for group, weights in (("", layer.norms), ("self_attn.", layer.attention)):
                for name, array in weights.items():
                    assert array.dtype == (mx.float32 if name in kept else dtype), name
                    if name in ("taps", "U", "O"):
                        continue
                    full = f"{prefix}{group}{name}"
                    values = checkpoint.load(
                        full if full in checkpoint.tensors else f"{full}.weight", np.float32
                    )
                    tolerance = 0 if array.dtype == mx.float32 or stored == "BF16" else 2**-8
                    got = np.array(array.astype(mx.float32))
                    np.testing.assert_allclose(got, values.reshape(got.shape), rtol=tolerance, err_msg=full)
            if "taps" in layer.attention:
                taps = [checkpoint.load(f"{prefix}self_attn.{s}_conv1d.weight")[:, 0] for s in "qkv"]
                np.testing.assert_array_equal(np.array(layer.attention["taps"]), np.stack(taps))
            else:
                config = checkpoint.config
                kv_b = checkpoint.load(f"{prefix}self_attn.kv_b_proj.weight")
                U, O = reference.split_kv_b(kv_b, config.num_attention_heads, config.qk_nope_head_dim)
                for name, values in (("U", U), ("O", O)):
                    got = np.array(layer.attention[name].astype(mx.float32))
                    np.testing.assert_allclose(got, values, rtol=2**-8, err_msg=name)


def test_rounding_to_bfloat16_is_to_nearest_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x7F7FFFFF], np.uint32)
    out = np.empty(len(bits), np.uint16)
    convert(bits.view(np.float32), out)
    assert [hex(b) for b in out] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80", "0xbf82", "0x7f80"]
    expected = mx.array(bits.view(np.float32)).astype(mx.bfloat16).view(mx.uint16)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("experts", ["mxfp4", "plain"])
@pytest.mark.parametrize("streams", [1, 3])
def test_experts_from_slots(tmp_path, experts, streams):
    rng = np.random.default_rng(8)
    config = random_config(rng, experts=experts, num_experts=9, num_experts_per_token=4)
    write_random_model(tmp_path, config, rng, experts=experts, dtype="BF16")
    with Checkpoint.open(tmp_path) as checkpoint:
        layer, latent = 2, checkpoint.config.routed_expert_hidden_size
        store = ExpertStore(checkpoint, 0, slots=MlxSlots())
        x = rng.standard_normal((13, latent)).astype(np.float32)
        ids = np.stack([rng.permutation(9)[:4] for _ in range(13)])
        weights = rng.random((13, 4)).astype(np.float32)
        pool = moe.ExpertStreams(mx.cpu, streams, group=streams)
        read = ExpertBytes()
        request = store.request(layer, np.unique(ids).tolist(), in_order=not moe.keeps_apart(ids, latent))
        got = pool.mix(
            mx.array(x), ids, weights, request, lambda h: read.matrices(layer, h), 4.0, 25.0, mx.eval
        )

        def fetch(experts):
            return ((int(e), checkpoint.load_expert(layer, int(e), np.float64)) for e in experts)

        expected = mix_experts(x.astype(np.float64), ids, weights.astype(np.float64), fetch, 4.0, 25.0)
        np.testing.assert_allclose(got, expected, atol=2e-5)
        store.close()


def test_sum_of_experts_does_not_depend_on_the_order_they_come_in(monkeypatch, tmp_path):
    rng = np.random.default_rng(9)
    config = random_config(rng, num_experts=9, num_experts_per_token=4)
    write_random_model(tmp_path, config, rng)
    with Checkpoint.open(tmp_path) as checkpoint:
        latent = checkpoint.config.routed_expert_hidden_size
        x = mx.array(rng.standard_normal((13, latent)).astype(np.float32))
        ids = np.stack([rng.permutation(9)[:4] for _ in range(13)])
        weights = rng.random((13, 4)).astype(np.float32)
        results = []
        for most in (moe.SUMMANDS_MAX, 0):
            monkeypatch.setattr(moe, "SUMMANDS_MAX", most)
            store = ExpertStore(checkpoint, 0, slots=MlxSlots())
            experts = np.unique(ids).tolist()
            request = store.request(1, experts[::-1] if most else experts, in_order=True)
            read = ExpertBytes()
            pool = moe.ExpertStreams(mx.cpu, 2, group=2)
            results.append(
                pool.mix(x, ids, weights, request, lambda h, r=read: r.matrices(1, h), 4.0, 25.0, mx.eval)
            )
            store.close()
        np.testing.assert_array_equal(*results)


def test_slots_are_aligned_and_shared_with_mlx():
    memory = MlxSlots().allocate(3 * ALIGN)
    assert memory.bytes.ctypes.data % ALIGN == 0
    assert memory.bytes.size >= 3 * ALIGN
    memory.bytes[ALIGN + 3] = 77
    assert memory.owner[memory.start + ALIGN + 3].item() == 77


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_rows_of_a_quantised_embedding(mode):
    table = mx.random.normal((10, 64), key=mx.random.key(1))
    codes, scales, *biases = mx.quantize(table, group_size=32, bits=4, mode=mode)
    w = Quantized(codes, scales, biases[0] if biases else None, 4, 32, mode)
    whole_table = mx.dequantize(codes, scales, *biases, group_size=32, bits=4, mode=mode, dtype=mx.float32)
    got = ops.rows(w, mx.array([7, 0, 7]), mx.float32)
    assert got.dtype == mx.float32
    np.testing.assert_array_equal(np.array(got), np.array(whole_table)[[7, 0, 7]])
    assert w.size == 640


def test_what_is_relied_on_holds_here():
    assert probe.surprises() == []


def test_a_surprise_is_told(monkeypatch):
    monkeypatch.setattr(probe.mx, "slice_update", lambda rows, new, start, axes: mx.array(np.array(rows)))
    assert len(probe.surprises()) == 1
    assert "an update of rows writes other rows" in probe.surprises()[0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_compiled_activations_give_the_bits_of_plain_ones(dtype):
    for tokens in (1, 3):
        gate, up = (mx.random.normal((tokens, 37), key=mx.random.key(n)).astype(dtype) for n in (1, 2))
        for beta in (4.0, 3.0):
            fused, plain = (
                ops.situ_on("metal")(gate, up, beta, 25.0),
                ops.situ_on("cpu")(gate, up, beta, 25.0),
            )
            assert fused.dtype == dtype
            np.testing.assert_array_equal(
                np.array(fused.astype(mx.float32)), np.array(plain.astype(mx.float32))
            )
        fused, plain = ops.gated_on("cuda")(gate, up), ops.gated_on("cpu")(gate, up)
        assert fused.dtype == dtype
        np.testing.assert_array_equal(np.array(fused.astype(mx.float32)), np.array(plain.astype(mx.float32)))
