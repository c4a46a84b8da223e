"""Reading an open checkpoint: stored bits, widening, caller's buffers, experts in one read, threads, changes."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3mlx.checkpoint import files, mxfp4, snapshot
from k3mlx.checkpoint.safetensors import TensorInfo, read_header
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.writer import to_bf16, write_safetensors
from k3mlx.errors import K3Error, ModelFilesError
from tests import tiny


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_spec_model(tmp_path_factory.mktemp("spec"), shards=3)


def change(folder: Path, tmp_path: Path, **tensors: object) -> Path:
    """A copy of the specification's model with some tensors replaced; `__` stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return tiny.write_model(tmp_path / "changed", tiny.SPEC_CONFIG, tiny.spec_tensors() | named)


def test_config_may_be_given(spec: Path, tmp_path: Path) -> None:
    for shard in spec.glob("model*"):
        shutil.copy(shard, tmp_path)
    with Checkpoint.open(spec) as checkpoint, Checkpoint.open(tmp_path, checkpoint.config) as other:
        assert other.config is checkpoint.config
        assert list(other.tensors) == list(checkpoint.tensors)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        Checkpoint.open(tmp_path)


def test_names_without_prefix_open_as_well(tmp_path: Path) -> None:
    folder = tiny.write_spec_model(tmp_path)
    write_safetensors(folder / "model.safetensors", tiny.spec_tensors())
    with Checkpoint.open(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(tiny.spec_tensors())


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_load_widens_every_stored_format(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_CHUNK", 100)  # several chunks, the last one short
    values = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    stored = {"F32": values, "F16": values.astype(np.float16), "BF16": ("BF16", to_bf16(values))}[dtype]
    folder = change(tmp_path, tmp_path, lm_head__weight=stored)
    expected = values.astype(np.float16) if dtype == "F16" else values
    if dtype == "BF16":
        expected = (to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    with Checkpoint.open(folder) as checkpoint:
        for wide in (np.float32, np.float64):
            loaded = checkpoint.load("lm_head.weight", wide)
            assert loaded.dtype == wide
            np.testing.assert_array_equal(loaded, expected.astype(wide))
        raw = checkpoint.raw("lm_head.weight")
        assert raw.dtype == {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype]
        np.testing.assert_array_equal(checkpoint.widen(raw), expected)


def test_load_of_bytes_is_refused(spec: Path) -> None:
    with Checkpoint.open(spec) as checkpoint, pytest.raises(ValueError, match="stored as uint8"):
        checkpoint.load("model.layers.1.block_sparse_moe.experts.0.w1.weight_packed")


def test_unknown_name(spec: Path) -> None:
    with Checkpoint.open(spec) as checkpoint:
        for name in ("lm_head", "language_model.lm_head.weight"):
            with pytest.raises(KeyError, match="lm_head"):
                checkpoint.raw(name)
        with pytest.raises(KeyError, match=r"experts\.6"):
            checkpoint.expert_tensors(1, 6)


def test_padded_and_bare_decay_are_the_same(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.A_log"
    padded = tiny.spec_tensors()[name]
    for stored in (padded, padded[:2]):
        with Checkpoint.open(change(tmp_path, tmp_path, **{name: stored})) as checkpoint:
            np.testing.assert_array_equal(checkpoint.load(name), padded[:2])
            np.testing.assert_array_equal(checkpoint.load(name, np.float64), padded[:2])


@pytest.mark.parametrize("value", [1e-30, np.nan])
def test_padding_of_decay_must_be_zero(tmp_path: Path, value: float) -> None:
    name = "model.layers.0.self_attn.A_log"
    padded = tiny.spec_tensors()[name].copy()
    padded[127] = value
    with (
        Checkpoint.open(change(tmp_path, tmp_path, **{name: padded})) as checkpoint,
        pytest.raises(ModelFilesError, match="A_log' has numbers other than zero beyond its 2 heads"),
    ):
        checkpoint.load(name)


def test_raw_into_a_callers_buffer(spec: Path) -> None:
    name, expected = "model.norm.weight", tiny.spec_tensors()["model.norm.weight"]
    region = np.full(1000, 0xEE, np.uint8)
    with Checkpoint.open(spec) as checkpoint:
        view = checkpoint.raw(name, out=region[7 : 7 + expected.nbytes])
        np.testing.assert_array_equal(view, expected)
        assert np.shares_memory(view, region)
        assert region[7 : 7 + expected.nbytes].tobytes() == expected.tobytes()
        assert (region[:7] == 0xEE).all()
        assert (region[7 + expected.nbytes :] == 0xEE).all()
        for out in (np.empty(32, np.float32), bytearray(128), memoryview(bytearray(128))):
            np.testing.assert_array_equal(checkpoint.raw(name, out=out), expected)
            assert bytes(out) == expected.tobytes()


@pytest.mark.parametrize(
    "out", [np.empty(31, np.float32), np.empty(64, np.float32)[::2], bytes(128), bytearray(129)]
)
def test_buffers_that_do_not_fit(spec: Path, out: Any) -> None:
    with (
        Checkpoint.open(spec) as checkpoint,
        pytest.raises(ValueError, match="expected a writable contiguous"),
    ):
        checkpoint.raw("model.norm.weight", out=out)


def test_expert_is_one_read(tmp_path: Path) -> None:
    with Checkpoint.open(tiny.write_spec_model(tmp_path)) as checkpoint:
        for layer in range(1, 5):
            for expert in range(6):
                tensors = checkpoint.expert_tensors(layer, expert)
                assert list(tensors) == [f"w{n}.weight_{p}" for n in (1, 2, 3) for p in ("packed", "scale")]
                (span,) = checkpoint.expert_spans(layer, expert)
                assert span.nbytes == sum(info.nbytes for info in tensors.values()) == 3 * (512 + 32)
                assert span.offset == min(info.offset for info in tensors.values())
                region = np.empty(span.nbytes, np.uint8)
                for part, array in checkpoint.read_span(span, region).items():
                    np.testing.assert_array_equal(array, checkpoint.raw(tensors[part].name))
                    assert np.shares_memory(array, region)


def test_expert_scattered_over_shards_and_gaps(tmp_path: Path) -> None:
    """Tensors of an expert that are apart, out of order or in two files are read by as many reads as needed."""
    tensors = tiny.spec_tensors()
    experts = [name for name in tensors if ".experts." in name]
    order = [name for name in experts if ".w2." in name] + [name for name in tensors if ".w2." not in name]
    folder = tiny.write_model(tmp_path, tiny.SPEC_CONFIG, {name: tensors[name] for name in order}, shards=2)
    with Checkpoint.open(folder) as checkpoint:
        spans = checkpoint.expert_spans(1, 0)
        apart = [f"w{n}.weight_{p}" for n in (1, 3) for p in ("packed", "scale")]
        assert [list(span.parts) for span in spans] == [["w2.weight_packed", "w2.weight_scale"], apart]
        for w, loaded in zip(("w1", "w2", "w3"), checkpoint.load_expert(1, 0, np.float64), strict=True):
            prefix = f"model.layers.1.block_sparse_moe.experts.0.{w}.weight_"
            expected = mxfp4.decode(tensors[prefix + "packed"], tensors[prefix + "scale"], np.float64)
            np.testing.assert_array_equal(loaded, expected)


def test_plain_experts(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    config = tiny.random_config(rng, "plain")
    tensors = tiny.random_tensors(config, rng, dtype="BF16")
    with Checkpoint.open(tiny.write_model(tmp_path, config, tensors)) as checkpoint:
        layer = checkpoint.config.num_hidden_layers - 1
        (span,) = checkpoint.expert_spans(layer, 2)
        assert list(span.parts) == ["w1.weight", "w2.weight", "w3.weight"]
        for w, loaded in zip(("w1", "w2", "w3"), checkpoint.load_expert(layer, 2), strict=True):
            bits = tensors[f"model.layers.{layer}.block_sparse_moe.experts.2.{w}.weight"][1]
            np.testing.assert_array_equal(loaded, checkpoint.widen(bits))
        assert loaded.shape == (
            checkpoint.config.moe_intermediate_size,
            checkpoint.config.routed_expert_hidden_size,
        )


def test_nan_scale_names_the_expert(tmp_path: Path) -> None:
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight_scale"
    scale = tiny.spec_tensors()[name].copy()
    scale[5, 0] = 255
    with (
        Checkpoint.open(change(tmp_path, tmp_path, **{name: scale})) as checkpoint,
        pytest.raises(ModelFilesError, match=r"layer 2, expert 3: MXFP4 scale byte 255 .* row 5, group 0"),
    ):
        checkpoint.load_expert(2, 3)


@pytest.mark.parametrize("system", ["preadv", "pread", "neither"])
def test_many_threads_read_right(spec: Path, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if system != "preadv":
        monkeypatch.delattr(os, "preadv", raising=False)
    if system == "neither":
        monkeypatch.delattr(os, "pread", raising=False)
    monkeypatch.setattr(files, "_READ_MAX", 30)  # a tensor takes many reads, of threads in turn
    expected = tiny.spec_tensors()
    with Checkpoint.open(spec) as checkpoint, ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for name, array in zip(expected, pool.map(checkpoint.raw, expected), strict=True):
                np.testing.assert_array_equal(array, expected[name])


def test_adjacent_offsets_of_two_files_are_two_reads() -> None:
    first = TensorInfo("a", "U8", (4,), Path("1"), 8, 4)
    second = TensorInfo("b", "U8", (4,), Path("2"), 12, 4)
    assert len(snapshot._merge({"a": first, "b": second})) == 2
    assert len(snapshot._merge({"a": first, "b": second._replace(path=Path("1"))})) == 1


def test_file_changed_before_its_first_read(tmp_path: Path) -> None:
    folder = tiny.write_spec_model(tmp_path)
    with Checkpoint.open(folder) as checkpoint:
        with open(folder / "model.safetensors", "ab") as file:
            file.write(b"x")
        with pytest.raises(ModelFilesError, match="changed since the model was opened"):
            checkpoint.raw("model.norm.weight")


def test_file_cut_while_open(tmp_path: Path) -> None:
    folder = tiny.write_spec_model(tmp_path)
    path = folder / "model.safetensors"
    with Checkpoint.open(folder) as checkpoint:
        last = max(checkpoint.tensors.values(), key=lambda info: info.offset)
        checkpoint.raw(last.name)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ModelFilesError, match="1 bytes of a read are missing: cut since"):
            checkpoint.raw(last.name)
        first = min(checkpoint.tensors.values(), key=lambda info: info.offset)
        np.testing.assert_array_equal(checkpoint.raw(first.name), tiny.spec_tensors()[first.name])


def test_file_removed_before_its_first_read(tmp_path: Path) -> None:
    folder = tiny.write_spec_model(tmp_path)
    with Checkpoint.open(folder) as checkpoint:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelFilesError, match="cannot be opened"):
            checkpoint.raw("model.norm.weight")


def test_read_error_names_file_and_place(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with Checkpoint.open(spec) as checkpoint:
        info = checkpoint.tensors["model.norm.weight"]
        monkeypatch.setattr(files._OpenFile, "_read_some", fail)
        with pytest.raises(ModelFilesError) as caught:
            checkpoint.raw("model.norm.weight")
    assert str(caught.value) == f"{info.path}: reading 128 bytes at {info.offset} failed (Input/output error)"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc/self/fd")
def test_files_are_opened_late_and_closed(spec: Path) -> None:
    def open_shards() -> int:
        return sum(str(link.resolve()).startswith(str(spec)) for link in Path("/proc/self/fd").iterdir())

    with Checkpoint.open(spec) as checkpoint:
        assert open_shards() == 0
        checkpoint.raw("lm_head.weight")
        checkpoint.raw("lm_head.weight")
        assert open_shards() == 1
        for name in checkpoint.tensors:
            checkpoint.raw(name)
        assert open_shards() == 3
    assert open_shards() == 0
    with pytest.raises(K3Error, match="read after the checkpoint was closed"):
        checkpoint.raw("lm_head.weight")
    checkpoint.close()


def test_close_waits_for_reads(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    read_some = files._OpenFile._read_some

    def slow(self: files._OpenFile, offset: int, view: memoryview) -> int:
        started.set()
        assert go_on.wait(10)
        return read_some(self, offset, view)

    monkeypatch.setattr(files._OpenFile, "_read_some", slow)
    checkpoint = Checkpoint.open(spec)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(checkpoint.raw, "lm_head.weight")
        assert started.wait(10)
        closing = pool.submit(checkpoint.close)
        assert not go_on.wait(0.1)
        assert not closing.done()
        go_on.set()
        np.testing.assert_array_equal(reading.result(10), tiny.spec_tensors()["lm_head.weight"])
        closing.result(10)


def test_metadata_and_order_of_tensors(spec: Path) -> None:
    with Checkpoint.open(spec) as checkpoint:
        assert checkpoint.notes == ()
        for name, info in checkpoint.tensors.items():
            assert info.name == name
            stored = read_header(info.path).tensors["language_model." + name]
            assert stored[1:] == info[1:]
