"""Streaming never changes a bit: budgets, policies, threads, direct reads, overlap, lookahead, warm start.

On numpy, and on MLX with experts in C and on streams, each against itself. On MLX each value of each option at least
once; `pytest -m slow` runs all combinations.
"""

import itertools

import numpy as np
import pytest

import k3mlx
from k3mlx.experts.policies import POLICIES
from k3mlx.experts.trace import read_trace
from k3mlx.reference.moe import mix_experts, route_topk

from .models import write_streaming_model

PROMPT = [5, 9, 2, 60, 11, 7, 7, 31, 4, 18, 22, 40, 3]
DEFAULTS = {
    "device": "cpu",
    "expert_cache": 10**9,
    "cache_policy": "lru",
    "io_threads": 2,
    "direct_io": "off",
    "pipe": "on",
    "lookahead": "off",
    "warm_start": "off",
}


def engine_on(folder, backend, **options):
    """An engine of a `backend` as the fixture names it."""
    name, _, kernel = backend.partition(" ")
    kernels = {"experts_kernel": kernel} if kernel else {}
    return k3mlx.load(folder, backend=name, **(DEFAULTS | kernels | options))


def outputs(folder, backend, **options):
    """All logits of a prompt and of ten greedy steps, the final state, and the report of experts."""
    with engine_on(folder, backend, **({"prefill_step_size": 5} | options)) as engine:
        session = engine.session()
        rows = [session.feed(PROMPT, all_logits=True)]
        for _ in range(10):
            rows.append(session.feed([int(rows[-1].reshape(-1, rows[-1].shape[-1])[-1].argmax())])[None])
        arrays = engine.backend.export_state(session.snapshot().state)
        return [np.concatenate(rows), *arrays.values()], engine.report()["experts"]


def assert_identical(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


ON_MLX = ("mlx", "mlx stream")


def on_each(everything, few):
    """Cases for numpy, which is fast, and fewer for the ways of MLX, as parameters that begin with the backend."""
    return [("numpy", *case) for case in everything] + [(name, *case) for name in ON_MLX for case in few]


@pytest.fixture(scope="module", params=["numpy", *ON_MLX])
def backend(request):
    if request.param != "numpy":
        pytest.importorskip("mlx.core", reason="mlx is not installed")
    return request.param


@pytest.fixture(scope="module")
def expected(streaming_folder, backend):
    return outputs(streaming_folder, backend)[0]


@pytest.fixture(scope="module")
def payload(streaming_folder):
    with k3mlx.load(streaming_folder, backend="numpy") as engine:
        return engine.backend.store.payload


@pytest.mark.parametrize(
    ("backend", "slots", "policy"),
    on_each(
        itertools.product([0, 3, 4, 14, 27], POLICIES),
        [(0, "s3fifo"), (3, "lru"), (4, "decayed"), (14, "lru"), (27, "decayed")],
    ),
    indirect=["backend"],
)
def test_budgets_and_policies(streaming_folder, backend, expected, payload, slots, policy):
    got, report = outputs(streaming_folder, backend, expert_cache=slots * payload, cache_policy=policy)
    assert_identical(got, expected)
    assert report["policy"] == policy
    assert (report["evictions"] > 0) == (slots < 27)


@pytest.mark.parametrize(
    ("backend", "threads", "direct", "pipe", "lookahead"),
    on_each(
        [*itertools.product([1, 2, 8], ["on", "off"], ["on", "off"], ["off"]),
         *itertools.product([1, 8], ["on"], ["on"], ["auto", 2, 9])],
        [(1, "on", "off", "off"), (2, "off", "on", "off"), (8, "on", "on", "off"), (8, "on", "on", "auto"),
         (1, "on", "on", 2), (8, "on", "on", 9)],
    ),
    indirect=["backend"],
)  # fmt: skip
def test_threads_direct_reads_overlap_and_lookahead(
    streaming_folder, backend, expected, payload, threads, direct, pipe, lookahead
):
    got, report = outputs(
        streaming_folder, backend, expert_cache=7 * payload, io_threads=threads, direct_io=direct, pipe=pipe,
        lookahead=lookahead,
    )  # fmt: skip
    assert_identical(got, expected)
    assert (report["io_threads"], report["direct_io"], report["pipe"]) == (
        threads,
        direct == "on",
        pipe == "on",
    )
    if lookahead == 9:  # every expert of the next layer, right ones among them
        assert report["prefetch_useful_bytes"] > 0


def test_warm_and_cold_start(streaming_folder, backend, expected, payload, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for turn in ("cold", "warm"):
        got, report = outputs(streaming_folder, backend, expert_cache=20 * payload, warm_start="on")
        assert_identical(got, expected)
        assert (report["warm_bytes"] > 0) == (turn == "warm")
    assert len(list((tmp_path / "k3mlx").iterdir())) == 1


@pytest.mark.parametrize("chunk", [1, 2, 13])
def test_other_chunks_have_their_own_bits_but_only_one_of_them(streaming_folder, backend, chunk):
    least, _ = outputs(streaming_folder, backend, prefill_step_size=chunk, expert_cache=0)
    most, _ = outputs(streaming_folder, backend, prefill_step_size=chunk, io_threads=8)
    assert_identical(least, most)


def test_the_numpy_mixture_is_the_references(streaming_folder):
    """Also when the outputs cannot be kept apart, so that experts come in the order of their ids."""
    rng = np.random.default_rng(11)
    with k3mlx.load(streaming_folder, backend="numpy", expert_cache=0, experts_kernel="numpy") as engine:
        config, experts = engine.config, engine.backend.model.experts
        store, checkpoint = engine.backend.store, engine._checkpoint
        for tokens in (1, 2, 30):
            x = rng.standard_normal((tokens, config.hidden_size)).astype(np.float32)
            latent = rng.standard_normal((tokens, config.routed_expert_hidden_size)).astype(np.float32)
            ids, weights = route_topk(x, rng.standard_normal((9, x.shape[1])).astype(np.float32),
                                      np.zeros(9, np.float32), 3, 1.5)  # fmt: skip
            for layer in (1, 3):
                wanted = mix_experts(
                    latent, ids, weights,
                    lambda chosen, layer=layer: ((e, checkpoint.load_expert(layer, e)) for e in chosen),
                    config.activation_situ_beta, config.activation_situ_linear_beta,
                )  # fmt: skip
                np.testing.assert_array_equal(experts.start(layer, x, ids, weights)(latent), wanted)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("k3mlx.experts.compute.SUMMANDS_MAX", 0)
                    np.testing.assert_array_equal(experts.start(layer, x, ids, weights)(latent), wanted)
        assert store.counters.evictions > 0


def test_a_prompt_reads_each_expert_of_a_layer_once(streaming_folder, backend, payload, tmp_path):
    trace = tmp_path / "trace"
    options = {"expert_cache": 4 * payload, "prefill_step_size": 64, "expert_trace": trace}
    with engine_on(streaming_folder, backend, **options) as engine:
        engine.session().feed(PROMPT)
        read = engine.report()["experts"]["bytes_read"]
    sizes, routings = read_trace(trace)
    assert sizes == {"experts": 9, "per_token": 3}
    routings = list(routings)
    assert [(r.layer, len(r.ids)) for r in routings] == [(1, 13), (2, 13), (3, 13)]
    assert read == sum(len(np.unique(r.ids)) for r in routings) * payload


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 1], ids="{:.0%} of the experts".format)
def test_the_whole_grid(streaming_folder, backend, expected, payload, share, policy, tmp_path, monkeypatch):
    """Budget, policy, threads, direct or buffered, lookahead, cold and then warm."""
    slots = max(3, round(share * 27)) if share else 0
    for number, (threads, direct, lookahead) in enumerate(
        itertools.product([1, 2, 8], ["on", "off"], ["off", "auto", 9])
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        for turn in ("cold", "warm"):
            got, report = outputs(
                streaming_folder, backend, expert_cache=slots * payload, cache_policy=policy,
                io_threads=threads, direct_io=direct, lookahead=lookahead, warm_start="on",
            )  # fmt: skip
            assert_identical(got, expected)
            if turn == "cold":
                assert report["warm_bytes"] == 0


def test_two_models_share_a_seed_but_not_their_bytes(tmp_path, backend, expected):
    """The comparison above can fail: another model has other logits."""
    other, _ = outputs(write_streaming_model(tmp_path, seed=6), backend)
    assert other[0].shape != expected[0].shape or (other[0] != expected[0]).any()
