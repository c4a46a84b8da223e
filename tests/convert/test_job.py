"""Conversions: the same bytes from any number of workers and after any stop, and folders that cannot be used.

Twenty kills of a conversion of any model, such as a slice of real widths:
    K3MLX_KILL_MODEL=FOLDER python -m pytest -m slow tests/convert/test_job.py
"""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from k3mlx.checkpoint.manifest import read_manifest
from k3mlx.checkpoint.overlay import open_overlay
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.checkpoint.writer import replacing
from k3mlx.convert import dense, files, folders
from k3mlx.convert import job as jobs
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.convert.job import Job
from k3mlx.errors import K3Error, ModelFilesError, ResourceError, UsageError
from tests.checkpoint.damage import edit_index, needs_links, rewrite
from tests.paths import NANO

from .conftest import contents, job


def test_bytes_do_not_depend_on_workers(source, overlay, tmp_path):
    for workers in (1, 5):
        out = tmp_path / str(workers)
        job(source, out, workers=workers).run()
        assert contents(out) == contents(overlay)


def test_a_finished_overlay_is_not_written_to(source, overlay):
    before = {path.name: path.stat() for path in overlay.iterdir()}
    job(source, overlay).run()
    after = {path.name: path.stat() for path in overlay.iterdir()}
    assert {n: (s.st_ino, s.st_mtime_ns) for n, s in after.items()} == {
        n: (s.st_ino, s.st_mtime_ns) for n, s in before.items()
    }


def test_only_dense_weights_are_copied(overlay, source):
    assert set(contents(overlay)) == {"config.json", "overlay.json", *read_manifest(overlay).names}
    with open_overlay(overlay) as checkpoint:
        assert {info.path.parent for info in checkpoint.expert_tensors(1, 2).values()} == {source}


def test_16_bits_are_the_bits_of_the_source(source, tmp_path):
    job(source, tmp_path / "same", bits=16).run()
    with open_overlay(tmp_path / "same") as ours, Checkpoint.open(source) as theirs:
        assert not ours.quantized
        assert set(ours.tensors) == set(theirs.tensors)
        for name in theirs.tensors:
            np.testing.assert_array_equal(ours.raw(name), theirs.raw(name), err_msg=name)


@pytest.mark.parametrize("blocks", [0, 1, 7, 30])
def test_a_run_that_failed_is_gone_on_with(source, overlay, tmp_path, monkeypatch, blocks):
    """What was finished is kept as it is, the rest is written, and nothing half written stays."""
    out, left, quantize = tmp_path / "out", [None] * blocks, dense.quantize

    def failing(*arguments):
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        return quantize(*arguments)

    monkeypatch.setattr(dense, "quantize", failing)
    with pytest.raises(ResourceError, match=r"disk full; make room and run the same command again"):
        job(source, out, workers=1).run()
    kept = {record.name: (out / record.name).stat().st_ino for record in read_manifest(out).files}
    assert len(kept) < len(read_manifest(out).names)
    assert bool(kept) == (blocks > 3)  # the first file has two quantised matrices
    assert not list(out.glob(".*"))
    with pytest.raises(ModelFilesError, match=rf"{len(kept)} of 5 files have been converted"):
        open_overlay(out)
    monkeypatch.undo()
    job(source, out).run()
    assert contents(out) == contents(overlay)
    assert {name: (out / name).stat().st_ino for name in kept} == kept


def test_a_file_that_cannot_be_synced_is_not_in_the_manifest(source, tmp_path, monkeypatch):
    def failing(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", failing)
    with pytest.raises(K3Error, match=r"dense-\S+safetensors: cannot be written \(Input/output error\)"):
        job(source, tmp_path / "out").run()
    assert read_manifest(tmp_path / "out").files == ()


@pytest.mark.parametrize("damage", ["byte", "cut", "gone"])
def test_a_finished_file_that_was_damaged_is_written_again(source, overlay, tmp_path, damage):
    out = Path(shutil.copytree(overlay, tmp_path / "out"))
    path = out / "dense-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(data if damage == "byte" else data[:-1])
    job(source, out).run()
    assert contents(out) == contents(overlay)


def test_a_run_with_other_settings_or_source_is_refused(source, overlay, tmp_path):
    with pytest.raises(UsageError, match=r"was begun with bits kda 4.*, not kda 8.*use another folder"):
        job(source, overlay, bits=8).run()
    other = Path(shutil.copytree(source, tmp_path / "other"))
    out = Path(shutil.copytree(overlay, tmp_path / "out"))
    before = contents(out)
    rewrite(next(other.glob("*1-of*.safetensors")), in_other_order)
    with pytest.raises(UsageError, match=r"was begun from another source"):
        job(other, out).run()
    assert contents(out) == before


def in_other_order(tensors):
    items = list(tensors.items())[::-1]
    tensors.clear()
    tensors.update(items)


def test_what_a_killed_run_left_half_written_is_removed(source, overlay, tmp_path):
    """Also where it was killed before it had finished anything, and where nothing else is to be done."""
    with replacing(tmp_path / "dense-00001.safetensors"):
        (temporary,) = tmp_path.glob(".*")
    for out in (Path(shutil.copytree(overlay, tmp_path / "finished")), tmp_path / "begun"):
        out.mkdir(exist_ok=True)
        (out / temporary.name).write_bytes(b"half")
        job(source, out).run()
        assert contents(out) == contents(overlay)


def test_folders_that_are_something_else_are_left_alone(source, overlay, tmp_path):
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(UsageError, match="has other files in it; expected a new folder"):
        job(source, tmp_path).run()
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]
    for same in (source, source / ".." / source.name):
        with pytest.raises(UsageError, match="the snapshot itself"):
            job(source, same).run()
    with pytest.raises(UsageError, match="is an overlay already"):
        job(overlay, tmp_path / "out").run()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written to"):
        job(source, tmp_path / "file").run()


def test_a_conversion_by_mlx_lm_is_no_source(source, tmp_path):
    folder = Path(shutil.copytree(source, tmp_path / "converted"))
    edit_index(
        folder, lambda index: index["weight_map"].update({"model.layers.1.mlp.switch_mlp.x": "x.safetensors"})
    )
    with pytest.raises(UsageError, match="is a conversion by mlx-lm; expected a snapshot as released"):
        job(folder, tmp_path / "out").run()
    assert not (tmp_path / "out").exists()


def test_small_files_beside_the_weights_are_copied(source, tmp_path, monkeypatch):
    """As they are, but for config.json, which says what most parts have and what each has; large ones are left."""
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    files_there = {
        "tiktoken.model": b"IQ== 0\n",
        "tokenizer_config.json": b'{"a": \xff}',
        "LICENSE.txt": b"free",
    }
    for name, data in (files_there | {"big.json": b" " * 101, "notes.md": b"no"}).items():
        (folder / name).write_bytes(data)
    monkeypatch.setattr(jobs, "SMALL_MAX", 100)
    bits = dict.fromkeys(PARTS, 8) | {"head": 4, "embed": 16}
    Job(folder, tmp_path / "out", Formats(bits, 32)).run()
    names = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert names == {"config.json", "overlay.json", *files_there}
    for name, data in files_there.items():
        assert (tmp_path / "out" / name).read_bytes() == data
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization") == {"mode": "affine", "bits": 8, "group_size": 32, "parts": bits}
    assert config == json.loads((source / "config.json").read_text())


@needs_links
def test_a_link_out_of_the_source_is_not_followed(source, tmp_path):
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    (tmp_path / "secret").write_text("{}")
    (folder / "secret.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelFilesError, match=r"secret.json: links to .*, outside the snapshot"):
        job(folder, tmp_path / "out").run()
    assert not (tmp_path / "out" / "secret.json").exists()


def test_two_runs_in_one_folder(source, tmp_path):
    pytest.importorskip("fcntl")
    with (
        folders.claimed(tmp_path / "out", "overlay.json"),
        pytest.raises(UsageError, match="another conversion is at work"),
    ):
        job(source, tmp_path / "out").run()
    job(source, tmp_path / "out").run()


def test_a_disk_that_is_too_small_is_told_before(source, overlay, tmp_path, monkeypatch):
    """All files together must fit, and a byte less is refused before anything is written."""
    usage, needed = shutil.disk_usage(tmp_path), folders._SPARE
    needed += sum(file.size for file in read_manifest(overlay).files)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(ResourceError, match=r"MB are needed, .* are free; make room"):
        job(source, tmp_path / "out").run()
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=needed))
    job(source, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(overlay)


def test_names_with_spaces_and_letters_of_all_kinds(source, overlay, tmp_path):
    folder = Path(shutil.copytree(source, tmp_path / "Mödel 模型 ünd so"))
    out = tmp_path / "aus gabe é"
    job(folder, out).run()
    assert contents(out) == contents(overlay)
    with open_overlay(out) as checkpoint:
        assert next(iter(checkpoint.expert_tensors(1, 0).values())).path.parent == folder


def test_nothing_is_written_to_the_source(source, tmp_path):
    before = {path.name: path.stat() for path in source.iterdir()}
    folder = source.stat().st_mtime_ns
    job(source, tmp_path / "out").run()
    assert {path.name: path.stat().st_mtime_ns for path in source.iterdir()} == {
        name: status.st_mtime_ns for name, status in before.items()
    }
    assert source.stat().st_mtime_ns == folder


@pytest.mark.parametrize("own_folder", [False, True, "by another way"])
def test_repacked_experts(source, overlay, tmp_path, own_folder):
    """An expert is one read at a whole block; with them the overlay needs the source no more."""
    out = tmp_path / "out"
    to = out if own_folder is True else tmp_path / "experts"
    if own_folder == "by another way":
        out.mkdir()
        to = out / ".." / "out"
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    job(folder, out, experts_to=to).run()
    shutil.rmtree(folder)
    with open_overlay(out) as ours, open_overlay(overlay) as theirs:
        assert set(ours.tensors) == set(theirs.tensors)
        for layer in range(1, 4):
            for expert in range(ours.config.num_experts):
                (span,) = ours.expert_spans(layer, expert)
                assert span.path.resolve() == to.resolve() / f"experts-{layer:05d}.safetensors"
                assert (span.offset - 4096) % span.nbytes == 0
                there = ours.load_expert(layer, expert)
                for mine, other in zip(there, theirs.load_expert(layer, expert), strict=True):
                    np.testing.assert_array_equal(mine, other)


def test_repacking_later_keeps_what_is_converted(source, overlay, tmp_path):
    out = Path(shutil.copytree(overlay, tmp_path / "out"))
    inode = (out / "dense-00001.safetensors").stat().st_ino
    job(source, out, experts_to=tmp_path / "experts").run()
    assert (out / "dense-00001.safetensors").stat().st_ino == inode
    with open_overlay(out) as checkpoint:
        assert checkpoint.expert_tensors(2, 0)["w1.weight_packed"].path.parent == tmp_path / "experts"


def convert(model: Path, out: Path) -> subprocess.Popen:
    """The command at work."""
    options = ["--model", str(model), "-o", str(out), "--workers", "2"]
    command = [sys.executable, "-m", "k3mlx", "convert", *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def killed(model: Path, out: Path, longest: float, moments: random.Random, most: int = 1000) -> list[bool]:
    """Convert with kills at random times, at most so many, until a run comes to its end.

    For each that was cut short, whether it left a file half written.
    """
    cut: list[bool] = []
    while True:
        process = convert(model, out)
        try:
            assert process.wait(None if len(cut) == most else moments.uniform(0.1, longest)) == 0
            return cut
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            cut.append(any(out.glob(".*.tmp")))


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_killed_and_gone_on_with(source, overlay, tmp_path):
    runs, moments = 0, random.Random(1)
    while True:
        out = tmp_path / str(runs)
        cut = killed(source, out, 1.5, moments, 4)
        assert contents(out) == contents(overlay)
        if cut:
            break
        runs += 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_killed_twenty_times(tmp_path):
    """K3MLX_KILL_MODEL: a snapshot in place of k3-nano; the kills and the rest take about six conversions."""
    model, out, whole = Path(os.environ.get("K3MLX_KILL_MODEL", NANO)), tmp_path / "out", tmp_path / "whole"
    started = time.monotonic()
    assert convert(model, whole).wait() == 0
    seconds = time.monotonic() - started
    longest = seconds / 2 if seconds > 20 else seconds  # a short run is half over before it writes
    cut, moments = [], random.Random(2)
    while len(cut) < 20:
        shutil.rmtree(out, ignore_errors=True)
        cut += killed(model, out, longest, moments, 20 - len(cut))
        print(f"{len(cut)} kills within {longest:.1f} s, {sum(cut)} of them left a file half written")
        assert contents(out) == contents(whole)
    assert any(cut)
