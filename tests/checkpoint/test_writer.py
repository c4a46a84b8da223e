"""Writing: rounding to bfloat16, the file format, shards, and nothing left behind by a failure."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3mlx.checkpoint.safetensors import read_header
from k3mlx.checkpoint.snapshot import Checkpoint, read_tensor
from k3mlx.checkpoint.writer import Lazy, encode_header, to_bf16, write_safetensors, write_sharded


def nearest_bf16(value: float) -> int:
    """The definition: of the two neighbours the nearer one, of equally near ones the even one."""
    low = int(np.abs(np.float64(value)).astype(np.float32).view(np.uint32)) >> 16
    candidates = [bits for bits in (low - 1, low, low + 1) if 0 <= bits <= 0x7F80]

    def exact(bits: int) -> float:
        return 2.0**128 if bits == 0x7F80 else float(np.uint32(bits << 16).view(np.float32))

    best = min(candidates, key=lambda bits: (abs(exact(bits) - abs(value)), bits & 1))
    return best | (math.copysign(1, value) < 0) << 15


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_bf16_of_float32(value: float) -> None:
    assert to_bf16(np.array([value], np.float32))[0] == nearest_bf16(value)


@given(st.floats(-(2.0**127), 2.0**127, allow_subnormal=False))
def test_bf16_of_float64(value: float) -> None:
    assert to_bf16(np.array([value]))[0] == nearest_bf16(value)


def test_bf16_rounds_once() -> None:
    above_tie = 1 + 2.0**-8 + 2.0**-40  # float32 would make it the tie, which goes to 1
    assert to_bf16(np.array([above_tie, -above_tie])).tolist() == [0x3F81, 0xBF81]
    below_tie = 1 + 3 * 2.0**-8 - 2.0**-40  # and this one the tie that goes up
    assert to_bf16(np.array([below_tie, -below_tie])).tolist() == [0x3F81, 0xBF81]
    assert to_bf16(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8])).tolist() == [0x3F80, 0x3F82]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_bf16_of_what_is_no_number(dtype: type) -> None:
    values: np.ndarray = np.array([np.inf, -np.inf, np.nan, -np.nan, 0, -0.0], dtype)
    bits = to_bf16(values)
    assert bits[[0, 1, 4, 5]].tolist() == [0x7F80, 0xFF80, 0, 0x8000]
    assert np.isnan(Checkpoint.widen(bits)[2:4]).all()
    signalling = np.array([0x7F800001, 0xFF80FFFF], np.uint32).view(np.float32)
    assert np.isnan(Checkpoint.widen(to_bf16(signalling))).all()


def test_bf16_of_huge_float64_is_infinite() -> None:
    huge = np.array([1e300, -1e300, 3.4028235e38, 3.3895e38])
    assert to_bf16(huge).tolist() == [0x7F80, 0xFF80, 0x7F80, 0x7F7F]


@given(st.integers(0, 0xFFFF))
def test_bf16_values_come_back(bits: int) -> None:
    stored = np.array([[bits]], np.uint16)
    for dtype in (np.float32, np.float64):
        wide = Checkpoint.widen(stored, dtype)
        assert wide.dtype == dtype
        if not np.isnan(wide[0, 0]):
            assert to_bf16(wide)[0, 0] == bits


def test_tensors_may_be_made_one_by_one(tmp_path: Path) -> None:
    alive: list[int] = []

    def make(number: int) -> np.ndarray:
        alive.append(number)
        return np.full((2, 3), number, np.uint16)

    tensors = [(f"t{n}", Lazy("BF16", (2, 3), lambda n=n: make(n))) for n in range(4)]
    size = write_safetensors(tmp_path / "a", tensors)
    assert alive == [0, 1, 2, 3]
    header = read_header(tmp_path / "a")
    assert header.stamp.size == size
    assert [read_tensor(info)[0, 0] for info in header.tensors.values()] == [0, 1, 2, 3]


def test_failure_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")

    def fail() -> np.ndarray:
        raise RuntimeError("no")

    for make in (fail, lambda: np.zeros(3, np.uint8), lambda: np.zeros(2, np.float32)):
        with pytest.raises((RuntimeError, ValueError), match=r"no|expected uint8"):
            write_safetensors(path, {"x": np.ones(5, np.uint8), "y": Lazy("U8", (2,), make)})
        assert path.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(ValueError, match="x: no dtype for a uint16 array"):
        write_safetensors(path, {"x": np.zeros(2, np.uint16)})
    with pytest.raises(ValueError, match="x: dtype 'F8' is not one of BF16"):
        write_safetensors(path, {"x": ("F8", np.zeros(2, np.uint8))})
    with pytest.raises(ValueError, match="given twice"):
        write_safetensors(path, [("x", np.zeros(2, np.uint8)), ("x", np.zeros(2, np.uint8))])
    with pytest.raises(ValueError, match="given twice"):
        write_sharded(tmp_path, [("x", np.zeros(2, np.uint8)), ("x", np.zeros(2, np.uint8))], shards=2)
    assert not list(tmp_path.iterdir())


def test_transposed_arrays_are_written_in_row_order(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write_safetensors(tmp_path / "a", {"x": array, "y": array[::2, ::-1]})
    tensors = read_header(tmp_path / "a").tensors
    np.testing.assert_array_equal(read_tensor(tensors["x"]), array)
    np.testing.assert_array_equal(read_tensor(tensors["y"]), array[::2, ::-1])


def test_data_starts_at_a_multiple_of_eight() -> None:
    for name in ("a", "ab", "abc", "abcdefgh"):
        head = encode_header([(name, "F32", (3,))])
        assert len(head) % 8 == 0
        assert json.loads(head[8:])[name]["data_offsets"] == [0, 12]


@pytest.mark.parametrize("shards", [1, 2, 5, 9])
def test_number_of_shards(tmp_path: Path, shards: int) -> None:
    sizes = [100, 1, 1, 1, 900, 1, 50, 50, 1]
    arrays = {f"t{n}": np.full(size, n, np.uint8) for n, size in enumerate(sizes)}
    index = json.loads(write_sharded(tmp_path, arrays, shards=shards).read_text())
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert list(index["weight_map"]) == list(arrays)
    files = [f"model-{n:05d}-of-{shards:06d}.safetensors" for n in range(1, shards + 1)]
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == files
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(read_tensor(read_header(tmp_path / file).tensors[name]), arrays[name])


def test_size_of_shards(tmp_path: Path) -> None:
    arrays = {f"t{n}": np.zeros(size, np.uint8) for n, size in enumerate([40, 60, 1, 500, 30, 30, 40, 1])}
    index = json.loads(write_sharded(tmp_path, arrays, max_bytes=100).read_text())
    groups: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        groups.setdefault(file, []).append(name)
    assert list(groups.values()) == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5", "t6"], ["t7"]]


@pytest.mark.parametrize("wanted", [{}, {"shards": 2, "max_bytes": 9}, {"shards": 0}, {"shards": 4}])
def test_shards_that_cannot_be(tmp_path: Path, wanted: dict) -> None:
    with pytest.raises(ValueError, match=r"either shards or max_bytes|cannot fill"):
        write_sharded(tmp_path, {f"t{n}": np.zeros(1, np.uint8) for n in range(3)}, **wanted)
