"""The MLX model against the float64 reference: random models of odd sizes, and the first-party captures."""

import numpy as np
import pytest

import k3mlx
from k3mlx.reference.model import Hooks
from tests.paths import GOLDEN_RUN, needs_golden, write_golden
from tests.tiny import random_config, write_random_model

PROMPT, STEPS = 60, 20
CUTS = [1, 9, 33]


def check(name, got, expected, tolerance):
    """Fail with tensor, worst index, both values and the tolerance."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    error = np.abs(got - expected)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    assert error[worst] <= tolerance, (
        f"{name}{list(map(int, worst))}: got {got[worst]:.8g}, expected {expected[worst]:.8g},"
        f" error {error[worst]:.2e}, tolerance {tolerance:.0e}"
    )


def check_decoding(session, float32, oracle, ids):
    """Steps within 1e-4 of float64, or within three times the most that numpy's float32 strays in the same steps.

    93 layers make up to 1e-4 of float32's own rounding: the second bound says what this model's conditioning allows.
    """
    rows = [[each.feed([id]).astype(np.float64) for each in (session, float32, oracle)] for id in ids]
    got, narrow, expected = np.array(rows).swapaxes(0, 1)
    check("decode steps", got, expected, max(1e-4, 3 * float(np.abs(narrow - expected).max())))


def check_state(name, engine, session, reference_session, tolerance):
    got, expected = engine.backend.export_state(session._state), reference_session._state.arrays()
    assert got.keys() == expected.keys()
    for key, array in expected.items():
        check(f"{name} {key}", got[key], array, tolerance)


@pytest.fixture
def random_model(request, tmp_path):
    seed, experts = request.param
    rng = np.random.default_rng(1000 + seed)
    config = random_config(rng, experts=experts)
    stored = "BF16" if "bfloat16" in request.node.name else "F32"
    return write_random_model(tmp_path, config, rng, experts=experts, dtype=stored), rng


PAIRS = [(seed, "mxfp4" if seed % 2 else "plain") for seed in range(30)]


@pytest.mark.parametrize("random_model", PAIRS, indirect=True, ids=[f"{s}-{e}" for s, e in PAIRS])
def test_float32_logits_and_state_of_random_models(random_model):
    folder, rng = random_model
    with (
        k3mlx.load(folder, backend="numpy", dtype="float64") as reference,
        k3mlx.load(folder, backend="mlx", device="cpu", dtype="float32") as engine,
    ):
        ids = rng.integers(0, engine.config.vocab_size, PROMPT + STEPS).tolist()
        oracle, one_shot, split = reference.session(), engine.session(), engine.session()
        expected = oracle.feed(ids[:PROMPT], all_logits=True)
        check("one-shot prompt", one_shot.feed(ids[:PROMPT], all_logits=True), expected, 1e-4)
        check_state("after the prompt:", engine, one_shot, oracle, 1e-4)
        for part in np.split(ids[:PROMPT], CUTS):
            start = len(split)
            rows = split.feed(part.tolist(), all_logits=True)
            check(f"prompt from {start}", rows, expected[start : len(split)], 1e-4)
        check_state("after the split prompt:", engine, split, oracle, 1e-4)
        for id in ids[PROMPT:]:
            check(f"step {len(oracle)}", one_shot.feed([id]), oracle.feed([id]), 1e-4)
        check_state("after the decode steps:", engine, one_shot, oracle, 1e-4)
        last_only = engine.session()
        check("only the last row", last_only.feed(ids[:PROMPT]), expected[-1], 1e-4)


@pytest.mark.parametrize("random_model", [(1, "mxfp4"), (2, "plain")], indirect=True)
def test_every_stage_of_a_pass(random_model):
    folder, rng = random_model
    stages, seen = {}, {}
    with (
        k3mlx.load(folder, backend="numpy", dtype="float64") as reference,
        k3mlx.load(folder, backend="mlx", device="cpu", dtype="float32") as engine,
    ):
        ids = rng.integers(0, engine.config.vocab_size, 5).tolist()
        for backend, store in ((reference.backend, stages), (engine.backend, seen)):
            probe = lambda stage, array, store=store: store.setdefault(stage, np.array(array))  # noqa: E731
            backend.forward(ids, backend.new_state(), True, Hooks(probe=probe))
    assert seen.keys() == stages.keys()
    for stage, array in seen.items():
        check(stage, array, stages[stage], 1e-4)


def kl_divergence(expected, got):
    """KL(softmax(expected) || softmax(got)) of each row, in nats."""

    def log_softmax(x):
        x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    p, q = log_softmax(expected), log_softmax(got)
    return (np.exp(p) * (p - q)).sum(axis=-1)


@pytest.mark.parametrize("random_model", PAIRS[:10], indirect=True, ids=[f"{s}-{e}" for s, e in PAIRS[:10]])
def test_bfloat16_divergence_of_random_models(random_model, record_property):
    folder, rng = random_model
    with (
        k3mlx.load(folder, backend="numpy", dtype="float64") as reference,
        k3mlx.load(folder, backend="mlx", device="cpu", dtype="bfloat16") as engine,
    ):
        ids = rng.integers(0, engine.config.vocab_size, PROMPT).tolist()
        expected = reference.session().feed(ids, all_logits=True)
        got = engine.session().feed(ids, all_logits=True)
        assert engine.backend.export_state(engine.backend.new_state())
    divergence = kl_divergence(expected, got)
    mean, median = float(divergence.mean()), float(np.median(divergence))
    record_property("kl_mean", mean)
    record_property("kl_median", median)
    print(f"KL to float64: mean {mean:.2e}, median {median:.2e} nats")
    assert median <= 1e-2  # the mean belongs to the rows where a close choice of experts went the other way
    assert mean <= 0.2


def test_float32_parameters_do_not_promote_the_residual_stream(tmp_path):
    rng = np.random.default_rng(5)
    write_random_model(tmp_path, random_config(rng), rng)
    dtypes = {}
    with k3mlx.load(tmp_path, backend="mlx", device="cpu", dtype="bfloat16") as engine:
        model, backend = engine.backend.model, engine.backend

        def watched():
            import mlx.core as mx

            import k3mlx.model.model as module

            original = module._probe

            def probe(stage, array):
                dtypes[stage.rpartition(".")[2]] = array.dtype
                return array

            module._probe = lambda hooks: probe
            try:
                with mx.stream(backend.room.stream):
                    _, updates = model.step([1, 2, 3], backend.new_state(), True, Hooks())
            finally:
                module._probe = original
            return mx, updates

        mx, updates = backend._call(watched)
    narrow = (
        "attention_mix",
        "attention_norm",
        "attention",
        "mlp_mix",
        "mlp_norm",
        "mlp",
        "partial",
        "final_norm",
    )
    assert {stage: dtypes[stage] for stage in narrow} == dict.fromkeys(narrow, mx.bfloat16)
    assert dtypes["weights"] == dtypes["mixed"] == dtypes["logits"] == mx.float32
    for update in updates:
        if hasattr(update, "state"):
            assert (update.windows.dtype, update.state.dtype) == (mx.bfloat16, mx.float32)
        else:
            assert update.dtype == mx.bfloat16


@pytest.fixture(scope="module")
def golden_folder(tmp_path_factory):
    return write_golden(tmp_path_factory.mktemp("golden"))


@needs_golden
def test_golden_logits_and_states(golden_folder):
    captures = dict(np.load(GOLDEN_RUN / "captures.npz"))
    with (
        k3mlx.load(golden_folder, backend="numpy", dtype="float64") as reference,
        k3mlx.load(golden_folder, backend="numpy", dtype="float32") as narrow,
        k3mlx.load(golden_folder, backend="mlx", device="cpu", dtype="float32") as engine,
    ):
        oracle, session = reference.session(), engine.session()
        oracle.feed(range(1, 9))
        session.feed(range(1, 9))
        logits, expected = session.feed([9]), oracle.feed([9])
        check("logits against the captures", logits, captures["logits"].ravel(), 3e-4)
        check("logits against float64", logits, expected, 1e-4)
        check_state("golden:", engine, session, oracle, 1e-4)
        float32 = narrow.session()
        float32.feed(range(1, 10))
        check_decoding(session, float32, oracle, range(10, 30))
