"""Against mlx-lm 0.32.2: the same checkpoint, and what mlx-lm makes of it with and without quantisation."""

import numpy as np
import pytest

import k3mlx
from k3mlx.errors import ModelFilesError, ResourceError
from tests.tiny import random_config, random_tensors, write_model

mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install mlx-lm==0.32.2")
mx = pytest.importorskip("mlx.core")

IDS = [1, 5, 2, 9, 3, 7, 11, 20, 23, 30, 13, 4, 8]
DECODED = [6, 2, 17, 1, 9]
KINDS = [("mxfp4", None), ("mxfp4", (64, 4)), ("mxfp4", (32, 8)), ("plain", None), ("plain", (64, 4))]


def convertible(experts):
    """A random model of sizes that 64-wide groups divide; the checkpoint's own dtype is bf16."""
    rng = np.random.default_rng(11)
    config = random_config(
        rng, experts=experts, num_hidden_layers=5, hidden_size=64, q_lora_rank=32, kv_lora_rank=64,
        qk_nope_head_dim=32, v_head_dim=32, num_attention_heads=2, intermediate_size=64,
        moe_intermediate_size=32 if experts == "mxfp4" else 64, routed_expert_hidden_size=64,
    )  # fmt: skip
    return config, random_tensors(config, rng, experts, dtype="BF16")


def load_with_mlx_lm(folder):
    """mlx-lm's model with every float in float32."""
    model, config = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32, lambda dtype: mx.issubdtype(dtype, mx.floating))
    return model, config


def logits_of_mlx_lm(folder):
    """Logits [prompt + decoded, V] of a prompt in one call and of decode steps with mlx-lm's cache."""
    with mx.stream(mx.cpu):
        model, _ = load_with_mlx_lm(folder)
        cache = model.make_cache()
        rows = [np.array(model(mx.array([IDS]), cache)[0])]
        rows += [np.array(model(mx.array([[id]]), cache)[0]) for id in DECODED]
    return np.concatenate(rows)


def logits_of(folder, **options):
    with k3mlx.load(folder, **options) as engine:
        session = engine.session()
        rows = [session.feed(IDS, all_logits=True)]
        return np.concatenate(rows + [session.feed([id], all_logits=True) for id in DECODED])


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def converted(request, tmp_path_factory):
    """(folder of the original, folder of mlx-lm's conversion, how experts and dense parts are stored)."""
    experts, quantised = request.param
    config, tensors = convertible(experts)
    source = write_model(tmp_path_factory.mktemp("source"), config, tensors)
    folder = tmp_path_factory.mktemp("converted")
    with mx.stream(mx.cpu):
        model, theirs = mlx_lm.utils.load_model(source)
        if quantised:
            model, theirs = mlx_lm.utils.quantize_model(model, theirs, *quantised, mode="affine")
        mlx_lm.utils.save_model(folder, model)
        mlx_lm.utils.save_config(theirs, folder / "config.json")
    return source, folder, experts, quantised


def test_released_layout_gives_the_logits_of_mlx_lm(converted):
    source, *_ = converted
    options = {"backend": "mlx", "device": "cpu", "dtype": "float32"}
    np.testing.assert_allclose(logits_of(source, **options), logits_of_mlx_lm(source), atol=1e-4, rtol=0)


def test_conversion_gives_the_logits_of_mlx_lm(converted):
    _, folder, experts, quantised = converted
    expected = logits_of_mlx_lm(folder)
    got = logits_of(folder, backend="mlx", device="cpu", dtype="float32")
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
    if experts == "plain" and quantised:
        with pytest.raises(ResourceError, match="only the mlx backend"):
            logits_of(folder, backend="numpy")
    else:
        np.testing.assert_allclose(logits_of(folder, backend="numpy"), expected, atol=1e-4, rtol=0)


def test_formats_of_a_conversion_are_reported(converted):
    _, folder, experts, quantised = converted
    with k3mlx.load(folder, backend="mlx", device="cpu", dtype="bfloat16") as engine:
        formats = {row["part"]: row["format"] for row in engine.report()["parts"]}
        assert all(np.isfinite(engine.session().feed(IDS)))
    dense = f"{quantised[1]}-bit affine" if quantised else "bfloat16"
    assert dense in formats["shared_experts"]
    assert dense in formats["head"]
    assert formats["experts"] == ("mxfp4" if experts == "mxfp4" else "affine" if quantised else "bfloat16")


def test_findings_name_what_is_wrong(converted):
    _, folder, *_ = converted
    header = (folder / "config.json").read_text()
    wrong = header.replace('"hidden_size": 64', '"hidden_size": 96')
    assert wrong != header
    (folder / "config.json").write_text(wrong)
    try:
        with pytest.raises(ModelFilesError, match=r"and \d+ more") as caught:
            k3mlx.load(folder, backend="numpy")
        assert len(str(caught.value).splitlines()) == 11
    finally:
        (folder / "config.json").write_text(header)
