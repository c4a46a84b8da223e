"""Which tensors are quantised: every large matrix, nothing that is sensitive, each part as asked."""

import pytest

from k3mlx.checkpoint.names import dense_specs
from k3mlx.config import ModelConfig, load_config
from k3mlx.convert.formats import PARTS, Format, Formats, dense_files, part_of
from k3mlx.errors import UsageError
from tests.paths import DATA, needs_data
from tests.tiny import SPEC_CONFIG

KEPT = (
    "norm.weight", "_conv1d.weight", "f_a_proj.weight", "f_b_proj.weight", "b_proj.weight", "_res_proj.weight",
    ".gate.weight", "e_score_correction_bias", "A_log", "dt_bias",
)  # fmt: skip


def formats_of(config, formats):
    return {
        spec.name: (formats.of(spec, kind), part_of(spec.name, kind))
        for _, kind, specs in dense_files(config)
        for spec in specs
    }


def test_every_tensor_is_in_one_file():
    config = ModelConfig.from_dict(SPEC_CONFIG)
    listed = [spec.name for _, _, specs in dense_files(config) for spec in specs]
    assert sorted(listed) == sorted(spec.name for spec in dense_specs(config))


@needs_data
def test_of_the_release_all_but_sensitive_tensors_are_quantised():
    config = load_config(DATA)
    found = formats_of(config, Formats(dict.fromkeys(PARTS, 4)))
    kept = {name for name, (form, _) in found.items() if form is None}
    assert all(
        name.endswith(KEPT) and not name.endswith(("q_b_proj.weight", "kv_b_proj.weight")) for name in kept
    )
    assert {form for form, _ in found.values()} == {None, Format(4, 64)}
    assert {part for _, part in found.values()} == {None, *PARTS}
    sizes = {spec.name: spec.nbytes for spec in dense_specs(config)}
    assert sum(sizes[name] for name in kept) < 0.02 * sum(sizes.values())


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_chosen_one_by_one(part):
    config = ModelConfig.from_dict(
        SPEC_CONFIG | {"text_config": SPEC_CONFIG["text_config"] | {"kv_lora_rank": 32, "q_lora_rank": 32}}
    )
    found = formats_of(config, Formats(dict.fromkeys(PARTS, 16) | {part: 8}, 32))
    chosen = {name: form for name, (form, _) in found.items() if form is not None}
    assert set(chosen.values()) == {Format(8, 32)}
    assert {found[name][1] for name in chosen} == {part}


def test_rows_take_the_largest_groups_that_divide_them():
    config = ModelConfig.from_dict(SPEC_CONFIG)  # hidden 32, intermediate 48, q rank 12
    found = formats_of(config, Formats(dict.fromkeys(PARTS, 4), 64))
    assert found["model.layers.0.self_attn.q_proj.weight"][0] == Format(4, 32)
    assert found["model.layers.0.self_attn.o_proj.weight"][0] == Format(4, 64)
    assert found["model.layers.0.mlp.down_proj.weight"][0] is None
    assert found["model.layers.2.self_attn.q_b_proj.weight"][0] is None


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="3 bits for kda: expected 4, 8 or 16"):
        Formats(dict.fromkeys(PARTS, 4) | {"kda": 3})
    with pytest.raises(UsageError, match="group size is 48"):
        Formats(dict.fromkeys(PARTS, 4), 48)
