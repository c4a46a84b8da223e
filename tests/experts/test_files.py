"""Positioned reads, direct and buffered, and files that change underneath."""

import os

import numpy as np
import pytest

from k3mlx.checkpoint.safetensors import FileStamp
from k3mlx.errors import ModelFilesError
from k3mlx.experts import files as files_module
from k3mlx.experts.files import SLICE, ExpertFiles, ReadGivenUp, direct_supported
from k3mlx.experts.slots import ALIGN, NumpySlots

SIZE = 3 * ALIGN + 777


def stamp(path):
    status = path.stat()
    return {path: FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(3).bytes(SIZE))
    return path


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def direct(request):
    if request.param and not direct_supported():
        pytest.skip("this system has no direct reads")
    return request.param


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, SIZE), (0, 1), (ALIGN, ALIGN), (5, 3), (ALIGN - 1, 2), (700, 2 * ALIGN), (3 * ALIGN, 777),
     (3 * ALIGN + 5, 700), (3 * ALIGN - 5, 782), (SIZE - 1, 1)],
)  # fmt: skip
def test_reads_of_any_window(file, direct, offset, nbytes):
    files = ExpertFiles(stamp(file), direct)
    memory = NumpySlots().allocate(8 * ALIGN).bytes
    memory[:] = 0xEE
    files.read(file, offset, nbytes, memory)
    files.close()
    start = offset % ALIGN
    assert memory[start : start + nbytes].tobytes() == file.read_bytes()[offset : offset + nbytes]
    window = -(-(start + nbytes) // ALIGN) * ALIGN
    assert (memory[window:] == 0xEE).all()


def test_the_system_may_stop_short_anywhere(file, direct, monkeypatch):
    whole, calls = os.preadv, []

    def short(descriptor, buffers, offset):
        calls.append(offset)
        (view,) = buffers
        take = len(view) if len(view) % ALIGN == 0 and len(calls) > 1 else max(1, len(view) // 3 - 7)
        if len(calls) == 1 and direct:  # a direct read cut inside a block
            data = file.read_bytes()[offset : offset + take]
            view[: len(data)] = data
            return len(data)
        return whole(descriptor, [view[:take]], offset)

    monkeypatch.setattr(files_module.os, "preadv", short)
    files = ExpertFiles(stamp(file), direct)
    memory = NumpySlots().allocate(8 * ALIGN).bytes
    files.read(file, 9, SIZE - 9, memory)
    files.close()
    assert memory[9:SIZE].tobytes() == file.read_bytes()[9:]
    assert len(calls) > 2


def test_a_file_that_was_cut_is_told_with_the_bytes_that_are_missing(file, direct):
    files = ExpertFiles({}, direct)
    memory = NumpySlots().allocate(8 * ALIGN).bytes
    files.read(file, 0, 10, memory)
    os.truncate(file, 2 * ALIGN + 1)
    with pytest.raises(ModelFilesError, match=r"bytes: (ends at byte 8193|changed since)"):
        files.read(file, 0, SIZE, memory)
    files.close()


@pytest.mark.parametrize("change", ["contents", "longer", "another file"])
def test_a_file_that_changed_is_refused(file, direct, change):
    files = ExpertFiles(stamp(file), direct)
    if change == "contents":
        os.utime(file, ns=(1, 1))
    elif change == "longer":
        with open(file, "ab") as out:
            out.write(b"x")
    else:
        copy = file.with_name("copy")
        copy.write_bytes(file.read_bytes())
        os.replace(copy, file)
    with pytest.raises(ModelFilesError, match="changed since the model was opened"):
        files.read(file, 0, 10, NumpySlots().allocate(ALIGN).bytes)
    files.close()


def test_a_file_replaced_after_opening_is_read_as_it_was(file, direct):
    files, before = ExpertFiles(stamp(file), direct), file.read_bytes()
    memory = NumpySlots().allocate(8 * ALIGN).bytes
    files.read(file, 0, SIZE, memory)
    copy = file.with_name("copy")
    copy.write_bytes(bytes(SIZE))
    os.replace(copy, file)
    files.read(file, 0, SIZE, memory)
    assert memory[:SIZE].tobytes() == before
    files.reopen(file)
    with pytest.raises(ModelFilesError, match="changed"):
        files.read(file, 0, 10, memory)
    files.close()


def test_a_read_can_be_given_up_between_slices(tmp_path, direct):
    path = tmp_path / "long"
    path.write_bytes(bytes(3 * SLICE))
    files = ExpertFiles(stamp(path), direct)
    asked = []

    def give_up():
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(ReadGivenUp):
        files.read(path, 0, 3 * SLICE, NumpySlots().allocate(3 * SLICE).bytes, give_up)
    files.close()
    assert len(asked) == 3


def test_a_missing_file_names_the_reason(tmp_path, direct):
    with pytest.raises(ModelFilesError, match=r"none: cannot be opened \(No such file"):
        ExpertFiles({}, direct).read(tmp_path / "none", 0, 1, NumpySlots().allocate(ALIGN).bytes)
