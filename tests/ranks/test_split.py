"""Dense weights split over ranks: what each reads, sessions whose states are on all of them, the same bits."""

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import k3mlx
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.names import dense_specs
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.convert.job import Job
from k3mlx.dense import stored_sizes
from k3mlx.devices import choose
from k3mlx.errors import UsageError
from k3mlx.needs import backend_needs
from k3mlx.ranks.part import Part
from tests.model.test_reference import check
from tests.paths import GOLDEN_RUN, ROOT, needs_golden, write_golden
from tests.tiny import random_config, write_random_model

from .launch import LIMIT, Ranks
from .run import KEPT
from .run import sessions as sessions_on
from .test_ranks import ends

pytestmark = pytest.mark.skipif(
    find_spec("mlx") is None, reason="mlx is not installed: pip install 'k3mlx[mlx]'"
)
OPTIONS = {"backend": "mlx", "device": "cpu", "dtype": "float32", "expert_cache": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(14)
    linear = {"num_heads": 3, "head_dim": 32}
    config = random_config(
        rng, num_hidden_layers=5, num_attention_heads=2, hidden_size=64, intermediate_size=96, v_head_dim=32,
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, linear_attn_config=linear,
    )  # fmt: skip
    return write_random_model(tmp_path_factory.mktemp("split"), config, rng)


@pytest.fixture(scope="module")
def int4(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("split4") / "overlay"
    Job(folder, target, Formats(dict.fromkeys(PARTS, 4), 32), 1, None, ()).run()
    return target


@pytest.fixture
def either(request, folder, int4):
    return {"float32": folder, "int4": int4}[request.param]


def loaded(checkpoint, part):
    """Every array of a model, by layer and name, of a part or of the whole; and the bytes read of each layer."""
    import mlx.core as mx

    from k3mlx.model.ops import Quantized
    from k3mlx.model.owner import OWNER
    from k3mlx.model.weights import Loader
    from k3mlx.watchdog import Watchdog

    def load(call):
        loader, read = Loader(checkpoint, mx.float32, in_place=True, part=part), []
        files = loader._reads._files
        original, count = files.read, []
        files.read = lambda path, offset, nbytes, memory: (
            count.append(nbytes),
            original(path, offset, nbytes, memory),
        )
        arrays = {}
        for layer in range(checkpoint.config.num_hidden_layers):
            count.clear()
            weights = loader.layer(layer)
            read.append(sum(count))
            for group in (weights.norms, weights.attention, weights.ffn):
                arrays |= {(layer, name): array for name, array in group.items()}
        arrays |= {(-1, name): array for name, array in loader.outer().items()}
        loader.close()
        values = {}
        for key, array in arrays.items():
            if isinstance(array, Quantized):
                array = mx.dequantize(
                    array.codes, array.scales, array.biases, group_size=array.group_size, bits=array.bits
                )
            values[key] = np.array(array)
        return values, read

    return OWNER.call(load, Watchdog())


@pytest.mark.parametrize("either", ["float32", "int4"], indirect=True)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_reads_its_part_of_every_tensor(either, size):
    with open_checkpoint(either) as checkpoint:
        whole, _ = loaded(checkpoint, None)
        parts = [Part.of(checkpoint, rank, size) for rank in range(size)]
        found = [loaded(checkpoint, part) for part in parts]
        expected = [stored_sizes(checkpoint, part) for part in parts]
    for (_, read), stored, part in zip(found, expected, parts, strict=True):
        for layer, (got, paper) in enumerate(zip(read, stored, strict=True)):
            # A_log is checked as a whole, by another way
            assert abs(got - paper) <= 4 * 128, (part.rank, layer)
    for key, array in whole.items():
        having = [values[key] for values, _ in found if key in values]
        if len(having) == 1 or having[0].shape == array.shape:
            for got in having:
                np.testing.assert_array_equal(got, array, err_msg=str(key))
            continue
        axis = next(n for n in range(array.ndim) if having[0].shape[n] != array.shape[n])
        np.testing.assert_array_equal(np.concatenate(having, axis=axis), array, err_msg=str(key))


def test_every_tensor_is_somewhere(folder):
    with open_checkpoint(folder) as checkpoint:
        parts = [Part.of(checkpoint, rank, 2) for rank in (0, 1)]
        for spec in dense_specs(checkpoint.config):
            assert any(part.has(spec.name) for part in parts), spec.name


@pytest.mark.slow
@pytest.mark.parametrize("either", ["float32", "int4"], indirect=True)
@pytest.mark.parametrize("size", [2, 4])
def test_sessions(tmp_path, either, size):
    (tmp_path / "ranks").mkdir()
    with k3mlx.load(either, **OPTIONS) as engine:
        engine.session().save(tmp_path / "empty.safetensors")
        session = engine.session()
        session.feed([2, 7, 1, 8])
        session.save(tmp_path / "one.safetensors")
        sessions_on(engine, tmp_path / "alone.json", tmp_path / "one.safetensors")
    with Ranks(
        tmp_path / "ranks", size, "sessions", tmp_path / "one.safetensors", folders={None: either}, dense=True
    ) as ranks:
        report = ranks.result()["report"]
    got, expected = np.load(tmp_path / "ranks" / "out.npy"), np.load(tmp_path / "alone.npy")
    check("rows", got, expected, 1e-4)
    np.testing.assert_array_equal(got[-3], got[-2])  # read again from the file: the same bits
    with k3mlx.load(either, **OPTIONS) as engine:  # a file of several ranks is one of a whole state
        check(
            "alone from the file of ranks",
            engine.load_session(tmp_path / "ranks/out.safetensors").feed([8]),
            expected[-2],
            1e-4,
        )
    choice = choose("mlx", "cpu")
    with open_checkpoint(either) as checkpoint:
        parts = [Part.of(checkpoint, rank, size) for rank in range(size)]
        states = [backend_needs(choice, checkpoint, "float32", part=part).state for part in parts]
    assert report["memory"]["state"] == states[0] + KEPT
    for row in report["ranks"][1:]:
        assert 2 <= row["states"] <= 6, "states of sessions that are gone are dropped"
        assert row["memory"]["state"] == states[row["rank"]] + KEPT, "room for kept sessions is on every rank"


@pytest.mark.slow
def test_the_same_bits_every_time(tmp_path, folder):
    rows = []
    for name in "ab":
        (tmp_path / name).mkdir()
        with Ranks(tmp_path / name, 3, "golden", folders={None: folder}, dense=True) as ranks:
            ranks.result()
        rows.append(np.load(tmp_path / name / "out.npy"))
    np.testing.assert_array_equal(*rows)


@pytest.fixture(scope="module")
def golden_folder(tmp_path_factory):
    return write_golden(tmp_path_factory.mktemp("golden"))


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_golden_logits(tmp_path, golden_folder, size, dense):
    captures = dict(np.load(GOLDEN_RUN / "captures.npz"))
    with Ranks(tmp_path, size, "golden", folders={None: golden_folder}, dense=dense) as ranks:
        ranks.result()
    got = np.load(tmp_path / "out.npy")
    with (
        k3mlx.load(golden_folder, backend="numpy", dtype="float64") as reference,
        k3mlx.load(golden_folder, **OPTIONS) as engine,
    ):
        rows = []
        for each in (reference, engine):
            session = each.session()
            session.feed(range(1, 9))
            rows.append(np.array([session.feed([id]) for id in range(9, 20)]))
    check("logits against the captures", got[0], captures["logits"].ravel(), 3e-4)
    check("logits against float64", got[0], rows[0][0], 1e-4)
    check("steps against float64", got, rows[0], max(1e-4, 3 * float(np.abs(rows[1] - rows[0]).max())))
    np.testing.assert_array_equal(got.argmax(axis=1), rows[1].argmax(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--dense-parallel",)])
def test_generate_as_the_readme_has_it(tmp_path, more):
    """Under `mlx.launch`: rank 0 alone prints, the text is that of one process, an old prompt is gone on with."""
    launch = Path(sys.executable).with_name("mlx.launch")
    if not launch.exists():
        pytest.skip(f"{launch} is not there: it comes with mlx")

    def generate(name, before, after):
        command = (
            "-m", "k3mlx", "generate", "-p", "What is 12 plus 30?", "--max-tokens", "16", "--device", "cpu",
            "--backend", "mlx", "--prompt-cache-file", str(tmp_path / f"{name}.cache"), "--json", str(tmp_path / name),
        )  # fmt: skip
        done = subprocess.run(
            [*before, sys.executable, *command, *after],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / name).read_text()), done.stdout, done.stderr

    alone, printed, _ = generate("alone", (), ())
    spread, together, said = generate("ranks", (str(launch), "-n", "2", "--"), more)
    assert spread["ids"] == alone["ids"]
    assert [row["rank"] for row in spread["report"]["ranks"]] == [0, 1]
    assert together.strip() == printed.strip()
    assert said.count("2 ranks: routed experts spread over them") == 1
    assert f"dense weights {'split over them' if more else 'on rank 0'}" in said
    assert (tmp_path / "ranks.cache").exists()


@pytest.mark.slow
def test_a_rank_that_does_not_split(tmp_path, folder):
    with Ranks(tmp_path, 2, "decode", 10, folders={None: folder}, dense={0}) as ranks:
        ends(ranks, "rank 1 has --dense-parallel off, rank 0 has on")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_ends_the_others(tmp_path, folder, victim):
    with Ranks(tmp_path, 3, "decode", 100_000, folders={None: folder}, dense=True) as ranks:
        ranks.wait_for_step(5)
        ranks.processes[victim].send_signal(signal.SIGKILL)
        ends(ranks, f"rank {victim} is lost")


def test_alone_it_is_an_error(monkeypatch):
    monkeypatch.delenv("MLX_RANK", raising=False)
    with pytest.raises(UsageError, match=r"this process is alone: start it with mlx\.launch"):
        k3mlx.load(dense_parallel=True)
