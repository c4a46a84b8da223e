"""Dense weights as stored, by the C kernels: the values of widened ones in fewer bytes, and a report that says so."""

import numpy as np
import pytest

import k3mlx
from k3mlx import dense_native
from k3mlx.backend import NumpyBackend
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.convert.job import Job
from k3mlx.devices import choose
from k3mlx.errors import ResourceError, UsageError
from k3mlx.experts import native
from k3mlx.kernels.cpu import load_cpu_kernels
from k3mlx.kernels.cpu_linear import Linear
from k3mlx.kernels.cpu_matrix import Matrix
from k3mlx.needs import backend_needs
from k3mlx.reference.model import Hooks
from tests.tiny import random_config, write_random_model

try:
    KERNELS = load_cpu_kernels(threads=2)
except ResourceError as error:
    pytest.skip(f"{error}", allow_module_level=True)

IDS = [1, 5, 2, 9, 3, 7, 11, 20, 23, 30, 13, 4, 8]
SIZES = {
    "num_hidden_layers": 4, "hidden_size": 96, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_attention_heads": 3, "intermediate_size": 160, "routed_expert_hidden_size": 64,
    "moe_intermediate_size": 32, "vocab_size": 67, "max_position_embeddings": 500,
}  # fmt: skip
FORMATS = {"BF16": "bfloat16", "F32": "float32", "4 bits": "int4", "8 bits": "int8"}


@pytest.fixture(scope="module", params=FORMATS)
def stored(request, tmp_path_factory):
    """(a model, the format of its attention's matrices)"""
    rng = np.random.default_rng(5)
    config, folder = random_config(rng, **SIZES), tmp_path_factory.mktemp("model")
    plain = "BF16" if request.param.endswith("bits") else request.param
    source = write_random_model(folder / "source", config, rng, dtype=plain)
    if request.param.endswith("bits"):
        Job(source, folder / "overlay", Formats(dict.fromkeys(PARTS, int(request.param[0]))), 1).run()
        return folder / "overlay", FORMATS[request.param]
    return source, FORMATS[request.param]


def logits(folder, **options):
    """Rows of a prompt and of a decoded token, and the parts of the report by name."""
    with k3mlx.load(folder, backend="numpy", **options) as engine:
        session = engine.session()
        rows = np.concatenate([session.feed(IDS, all_logits=True), session.feed([3], all_logits=True)])
        return rows, {part["part"]: part for part in engine.report()["parts"]}


def test_agrees_with_float64_and_says_what_it_is(stored):
    folder, form = stored
    law, _ = logits(folder, dtype="float64")
    got, parts = logits(folder, dense_kernel="native")
    np.testing.assert_allclose(got, law, atol=3e-5 * np.abs(law).max(), rtol=0)
    for part in ("kda", "mla", "head", "shared_experts"):
        assert form in parts[part]["format"]
        assert parts[part]["kernel"].startswith("C kernels, ")
    assert parts["attn_res_mix"]["kernel"].startswith("C kernels, ")
    widened, parts = logits(folder, dense_kernel="numpy")
    assert (parts["kda"]["kernel"], parts["kda"]["format"]) == ("numpy", "float32")
    assert not np.array_equal(widened, got)


def backend(checkpoint, resident, threads=2):
    kernels = load_cpu_kernels(threads=threads)
    return NumpyBackend(checkpoint, "float32", None, resident=resident, cpu_threads=threads, dense=kernels)


def test_same_bits_for_any_number_of_threads_and_for_streamed_layers(stored):
    with open_checkpoint(stored[0]) as checkpoint:
        expected = None
        for resident, threads in ((None, 1), (None, 3), ((2,), 2), ((), 1)):
            made = backend(checkpoint, resident, threads)
            passes = [made.forward(IDS, made.new_state(), True, Hooks())[0] for _ in range(2)]
            read = made.dense_report()["bytes_read"]
            made.close()
            expected = passes[0] if expected is None else expected
            for rows in passes:
                np.testing.assert_array_equal(rows, expected, err_msg=f"{resident} {threads}")
            assert (read > 0) == (resident is not None)


@pytest.mark.parametrize(("resident", "settled"), [(None, False), (None, True), ((), False)])
def test_a_layer_is_computed_before_the_next_where_it_has_to_be(stored, resident, settled):
    """Its weights may be gone by then, or somebody times it. Elsewhere several layers' work may be one call."""
    with open_checkpoint(stored[0]) as checkpoint:
        made = backend(checkpoint, resident)
        waiting, state = [], made.new_state()
        hooks = Hooks(lambda layer: waiting.append(len(made.model.parts.queue.kept)), settled=settled)
        for ids in (IDS, [3]):
            _, state = made.forward(ids, state, False, hooks)
        assert made.model.parts.queue.kept == []
        made.close()
    assert len(waiting) == 2 * checkpoint.config.num_hidden_layers
    assert (max(waiting) == 0) == (settled or resident == ())


def test_the_plan_counts_what_is_held(stored):
    with open_checkpoint(stored[0]) as checkpoint:
        made = backend(checkpoint, None)
        groups = [made.model.outer]
        groups += [g for w in made.model.layers._kept.values() for g in (w.norms, w.attention, w.ffn)]
        held = sum(w.nbytes for group in groups for w in group.values())
        made.close()
        needs = backend_needs(choose("numpy", "cpu"), checkpoint, "float32", as_stored=True)
        padding = 4 * 128 * checkpoint.config.num_hidden_layers  # of A_log, in the files only
        assert held <= needs.dense.total <= held + padding
        if stored[1] != "float32":
            widened = backend_needs(choose("numpy", "cpu"), checkpoint, "float32")
            assert held < 0.75 * widened.dense.total


def test_by_default_all_but_small_models_are_kept_as_stored(stored, monkeypatch):
    assert logits(stored[0])[1]["kda"]["kernel"] == "numpy"
    monkeypatch.setattr(dense_native, "SMALL_HIDDEN", 64)
    assert logits(stored[0])[1]["kda"]["kernel"].startswith("C kernels")
    assert logits(stored[0], dtype="float64")[1]["kda"]["kernel"] == "numpy"


def test_wrong_results_on_this_machine_switch_it_off_aloud(stored, monkeypatch):
    failed = native.verify(KERNELS)[0]._replace(ok=False, worst=0.5)
    monkeypatch.setattr(native, "verify", lambda kernels: [failed])
    monkeypatch.setattr(dense_native, "SMALL_HIDDEN", 64)
    with k3mlx.load(stored[0], backend="numpy") as engine:
        assert any("dense weights widened, on numpy" in line for line in engine.backend.notes)
        assert engine.report()["parts"][0]["kernel"] == "numpy"
    with pytest.raises(ResourceError, match="compute wrong on this machine"):
        k3mlx.load(stored[0], backend="numpy", dense_kernel="native")


def test_what_cannot_be_is_refused(stored):
    with pytest.raises(UsageError, match="float32 on numpy, not in float64"):
        k3mlx.load(stored[0], dtype="float64", dense_kernel="native")
    with pytest.raises(UsageError, match="dense_kernel is 'blas', expected one of auto, native, numpy"):
        k3mlx.load(stored[0], dense_kernel="blas")


def test_a_linear_weight_stands_where_an_array_would():
    weight = Linear(KERNELS, Matrix.dense(np.ones((3, 5), np.float32)))
    assert weight.shape == (3, 5)
    assert weight.T.shape == (5, 3)
    assert weight.nbytes == 60
    np.testing.assert_array_equal(np.ones((2, 5), np.float32) @ weight.T, np.full((2, 3), 5.0))
    with pytest.raises(UsageError, match="expected float32"):
        np.ones((2, 5)) @ weight.T
