"""Headers: what a good file says, and that every bad one is a clear ModelFilesError."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.findings import Findings
from k3mlx.checkpoint.safetensors import HEADER_MAX, read_header
from k3mlx.checkpoint.snapshot import read_tensor
from k3mlx.checkpoint.writer import write_safetensors
from k3mlx.errors import ModelFilesError


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header: an object for JSON, or the bytes themselves."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, dtype: str = "U8", shape: object = None) -> dict:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.safetensors"


def message(path: Path) -> str:
    with pytest.raises(ModelFilesError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_offsets_are_absolute_and_bits_come_back(path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "bytes": np.arange(5, dtype=np.uint8),
        "empty": np.empty((0, 7), np.float32),
        "single": np.arange(4, dtype=np.float32).reshape(1, 2, 2) / 3,
        "ids": np.array([-1, 1 << 40]),
    }
    write_safetensors(path, arrays, {"made": "here"})
    header = read_header(path)
    assert header.metadata == {"made": "here"}
    assert header.stamp.size == path.stat().st_size
    content = path.read_bytes()
    for name, array in arrays.items():
        info = header.tensors[name]
        assert (info.name, info.shape, info.path) == (name, array.shape, path)
        assert content[info.offset : info.offset + info.nbytes] == array.tobytes()
        np.testing.assert_array_equal(read_tensor(info), array, strict=True)


def test_file_cut_at_any_byte(path: Path) -> None:
    size = write_safetensors(path, {"a": np.ones((3, 5), np.float32), "b": np.zeros(7, np.uint8)})
    content = path.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    for cut in range(size):
        path.write_bytes(content[:cut])
        if cut >= head:
            expected = f"truncated, {size - cut} bytes are missing ({cut} present, {size} expected)"
        elif cut >= 8:
            expected = f"truncated in its header, at least {head - cut} bytes are missing"
        else:
            expected = f"truncated, {cut} bytes, at least {8 - cut} are missing"
        assert expected in message(path)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": \xff}', "not valid JSON"),
        (b"[" * 100_000, "not usable JSON|not valid JSON"),
        (b'{"a":' * 50_000, "not usable JSON|not valid JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON|described as"),
        (b'{"a": {}, "a": {}}', "'a' appears twice"),
        ([], "header is \\[\\], expected a JSON object"),
        ({"__metadata__": 3}, "__metadata__ is 3"),
        ({"a": 3}, "described as 3"),
        ({"a": 10**3999}, "described as 1000"),
        ({"a": {"dtype": "U8", "shape": [1]}}, "expected dtype, shape and data_offsets"),
        ({"a": entry(0, 1, shape={})}, "described as"),
        ({"a": entry(0, 1, shape="1")}, "described as"),
        ({"a": entry(0, 1, shape=[True])}, "described as"),
        ({"a": entry(0, 1, shape=[1.0])}, "described as"),
        ({"a": entry(0, 1, shape=[-1, -1])}, "described as"),
        ({"a": entry(0, 1, shape=[1] * 9)}, "described as"),
        ({"a": entry(-1, 0)}, "described as"),
        ({"a": entry(1, 0, shape=[1])}, "described as"),
        ({"a": entry(0, 1, dtype="F8_E4M3")}, "dtype 'F8_E4M3', expected one of BF16, F16, F32"),
        ({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}, "described as"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, "described as"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}, "described as"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, 1]}}, "described as"),
        ({"a": entry(0, 8, shape=[7])}, "has 8 bytes, expected 7 for U8 \\[7\\]"),
        ({"a": entry(0, 8, "F32", [1, 3])}, "has 8 bytes, expected 12"),
        ({"a": entry(0, 8, "F32", [1 << 61, 1 << 61])}, "has 8 bytes, expected 2126764793255865"),
        ({"a": entry(0, 8, shape=[1 << 70])}, "described as"),
        ({"a": entry(0, 9)}, "truncated, 1 bytes are missing"),
        ({"a": entry(0, 1 << 61)}, "truncated, 2305843009213693944 bytes are missing"),
        ({"a": entry(0, 7)}, "1 bytes after the last tensor"),
        ({"a": entry(1, 8)}, "1 bytes before tensor 'a' belong to no tensor"),
        ({"a": entry(0, 5), "b": entry(4, 8)}, "tensor 'b' overlaps 'a'"),
        ({"a": entry(0, 8), "b": entry(2, 3)}, "tensor 'b' overlaps 'a'"),
        ({"a": entry(0, 4), "b": entry(4, 8), "c": entry(4, 8)}, "overlaps"),
        ({"a": entry(0, 3), "b": entry(5, 8)}, "2 bytes before tensor 'b'"),
    ],
)
def test_bad_header(path: Path, header: object, expected: str) -> None:
    text = message(write(path, header, bytes(8)))
    assert re.search(expected, text), text
    assert len(text) < 500


@pytest.mark.parametrize("length", [HEADER_MAX + 1, 1 << 40, (1 << 64) - 1])
def test_huge_header_is_refused_unread(path: Path, length: int) -> None:
    assert f"header of {length} bytes, expected at most" in message(write(path, {}, length=length))


def test_every_problem_is_told(path: Path) -> None:
    header = {"a": entry(0, 4, shape=[9]), "b": entry(4, 6, "I8"), "c": 1, "d": entry(6, 8), "e": entry(7, 8)}
    findings = Findings()
    found = read_header(write(path, header, bytes(8)), findings)
    assert findings.count == len(findings.lines) == 4
    assert found.rejected == {"a", "b", "c"}
    assert set(found.tensors) == {"d", "e"}
    assert len(message(path).splitlines()) == 4


def compact(header: object) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def test_the_released_form_is_read_as_json_is(path: Path) -> None:
    """A header without spaces is read another way; one space more makes it JSON like any other."""
    arrays = {
        "x.a": np.ones((2, 3), np.float32),
        "x.ü": np.zeros((), np.uint8),
        "b": np.ones((0, 4), np.int64),
    }
    write_safetensors(path, arrays)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    quick = read_header(path, prefix="x.")
    assert [info.name for info in quick.tensors.values()] == ["a", "ü", "b"]
    assert quick == read_header(path, prefix="x.")
    write(path, content[8:end].replace(b'"shape":', b'"shape": '), content[end:])
    slow = read_header(path, prefix="x.")
    assert list(slow.tensors) == list(quick.tensors) == ["x.a", "x.ü", "b"]
    for name, info in slow.tensors.items():
        shift = info.offset - quick.tensors[name].offset
        assert info._replace(offset=info.offset - shift) == quick.tensors[name]
        np.testing.assert_array_equal(read_tensor(info), arrays[name], strict=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (compact({"a": entry(0, 3), "b": entry(4, 8)}), "1 bytes before tensor 'b'"),
        (compact({"a": entry(0, 8), "b": entry(2, 3)}), "overlaps"),
        (compact({"a": entry(0, 7)}), "1 bytes after"),
        (compact({"a": entry(0, 9)}), "truncated, 1 bytes are missing"),
        (compact({"a": entry(0, 8, shape=[True])}), "described as"),
        (compact({"a": entry(0, 8, shape=[1] * 9)}), "described as"),
        (compact({"a": entry(0, 8, dtype="F8_E4M3", shape=[8])}), "has dtype 'F8_E4M3'"),
        (compact({"a": entry(0, 4), "b": entry(4, 8)}).replace(b"b", b"a"), "'a' appears twice"),
        (compact({"a": entry(0, 4), "b": entry(4, 8)}).replace(b',"b"', b';"b"'), "not valid JSON"),
        (compact({"a": entry(0, 8)}).replace(b"[8]", b"[08]"), "not valid JSON"),
        (compact({"a": entry(0, 8)}).replace(b"8]}", b"08]}"), "not valid JSON"),
        (compact({"a": entry(0, 8)}) + b"}", "not valid JSON"),
        (compact({"a\n": entry(0, 8)}).replace(b"\\n", b"\n"), "not valid JSON"),
        (compact({"__metadata__": entry(0, 8)}), "8 bytes after the last tensor"),
    ],
)
def test_the_released_form_with_something_wrong(path: Path, text: bytes, expected: str) -> None:
    assert re.search(expected, message(write(path, text, bytes(8))))


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert "file not found" in message(tmp_path / "none")
    assert "not a regular file" in message(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "not a regular file" in message(tmp_path / "pipe")
