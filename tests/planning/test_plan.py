"""The plan on paper is the engine's own; hit rates and speeds behave, and hold what has been published."""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import k3mlx
from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.cli import main
from k3mlx.convert.formats import PARTS, Formats
from k3mlx.convert.job import Job
from k3mlx.devices import Choice
from k3mlx.errors import ResourceError
from k3mlx.experts import native
from k3mlx.governor import plan_memory
from k3mlx.kernels.cpu import load_cpu_kernels
from k3mlx.needs import Needs, backend_needs
from k3mlx.planning import hits, machines, speed
from k3mlx.planning.outlook import look
from k3mlx.planning.paper import PaperCheckpoint
from k3mlx.planning.plan import METAL, Case, best, case, mac_budget, model_needs, sizes
from k3mlx.planning.released import RELEASED
from k3mlx.planning.source import describe
from tests import tiny
from tests.doctor.facts import TRIAL
from tests.scripts_at import script

BUDGETS = (1 << 20, 1 << 30, 1 << 40)
GB = 10**9


def values(needs: Needs) -> dict:
    """Everything of some needs but the process, functions by what they give."""
    fields = vars(replace(needs, process=0)).copy()
    for name, arguments in (("activations", (1, 77)), ("scratch", BUDGETS)):
        fields[name] = [fields[name](argument) for argument in arguments]
    return fields


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(31)
    config = tiny.random_config(rng, hidden_size=64, num_hidden_layers=5, intermediate_size=96)
    return tiny.write_random_model(tmp_path_factory.mktemp("model"), config, rng, dtype="BF16", shards=3)


@pytest.mark.parametrize("choice", [Choice("numpy", "cpu"), METAL, Choice("mlx", "cuda")])
def test_needs_on_paper_are_those_of_the_files(written: Path, choice: Choice) -> None:
    with open_checkpoint(written) as checkpoint:
        paper = PaperCheckpoint(checkpoint.config)
        for context in (8192, 300):
            expected = backend_needs(choice, checkpoint, None, context)
            assert values(backend_needs(choice, paper, None, context)) == values(expected)


@pytest.mark.parametrize("choice", [Choice("numpy", "cpu"), METAL])
def test_needs_on_paper_are_those_of_an_overlay(written: Path, tmp_path: Path, choice: Choice) -> None:
    formats = Formats({part: 8 if part == "head" else 4 for part in PARTS}, 32)
    Job(written, tmp_path / "overlay", formats, 1, None, ()).run()
    source = describe(str(tmp_path / "overlay"))
    with open_checkpoint(tmp_path / "overlay") as checkpoint:
        assert checkpoint.quantized
        paper = source.formats["as stored"]
        assert paper.quantized.keys() == checkpoint.quantized.keys()
        assert values(backend_needs(choice, paper, None)) == values(backend_needs(choice, checkpoint, None))


@pytest.mark.parametrize("widened", ["", "a small model", "kernels that compute wrong"])
def test_weights_on_numpy_are_counted_as_the_engine_holds_them(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], widened: str
) -> None:
    """By plan, by doctor and by the engine: as stored where the C kernels take them so, else in float32."""
    if widened != "a small model":
        try:
            kernels = load_cpu_kernels()
        except ResourceError as error:
            pytest.skip(str(error))
        monkeypatch.setattr("k3mlx.dense_native.SMALL_HIDDEN", 63)
    if widened == "kernels that compute wrong":
        check = native.verify(kernels)[0]._replace(ok=False)
        monkeypatch.setattr(native, "verify", lambda kernels: [check])
    with k3mlx.load(written, backend="numpy") as engine:
        held = engine.governor.plan.weights
        kernel = {part["part"]: part["kernel"] for part in engine.report()["parts"]}["kda"]
    assert kernel.startswith("numpy" if widened else "C kernels")
    (paper, *_) = describe(str(written)).formats.values()
    assert model_needs(Choice("numpy", "cpu"), paper, 8192).dense.total == held
    monkeypatch.setattr("k3mlx.doctor.trial.run_trial", lambda backend, device: TRIAL)
    assert (
        main(["doctor", "--model", str(written), "--backend", "numpy", "--json", "-"]) == 3
    )  # no vocabulary
    found = json.loads(capsys.readouterr().out)["findings"]
    (memory,) = (finding["data"] for finding in found if finding["code"] == "memory")
    assert memory["weights"] == held


def test_context_takes_state() -> None:
    checkpoint = PaperCheckpoint(RELEASED)
    short, long = (model_needs(METAL, checkpoint, context) for context in (8192, 131_072))
    assert long.state - short.state == 3 * 2 * 27_648 * (131_072 - 8192)
    assert model_needs(METAL, checkpoint, 1 << 30).state == model_needs(METAL, checkpoint, 1 << 20).state


def test_the_three_budgets() -> None:
    for _, _, needs in released():
        found = sizes(needs)
        assert found.smallest < found.resident < found.recommended
        assert plan_memory(needs, found.resident, None).dense_bytes_per_pass == 0
        assert plan_memory(needs, found.resident - (1 << 20), None).dense_bytes_per_pass > 0
        recommended = plan_memory(needs, found.recommended, None)
        assert recommended.cache >= 2 * 25_829_572_608
        assert recommended.dense_bytes_per_pass == 0


@cache
def released() -> list[tuple[str, Checkpoint, Needs]]:
    return [(name, c, model_needs(METAL, c, 8192)) for name, c in describe(None).formats.items()]


def cases(memory: int, rate: float) -> list[Case]:
    return [case(name, checkpoint, needs, memory, rate) for name, checkpoint, needs in released()]


@pytest.mark.parametrize(
    ("memory", "rate", "chip", "published"),
    [(64 * GB, 5.0, "M1 Max", (0.29, 0.29)), (128 * GB, 13.6, "M5 Max", (0.28, 0.54))],
)
def test_published_measurements_lie_within_the_ranges(
    memory: int, rate: float, chip: str, published: tuple[float, float]
) -> None:
    """Of the budget as such and of the Mac as it is sold."""
    (mac,) = (mac for mac in machines.MACS if mac.chip == chip)
    assert mac.disk_rate == rate * GB
    for budget in (memory, mac_budget(mac)):
        found = best(cases(budget, rate * GB)).tokens_per_second
        assert found.low <= published[0]
        assert found.high >= published[1]
        assert found.high <= 2.5 * found.low


def test_no_range_is_wider_than_it_says() -> None:
    outlook = look(None, 8192, 16 * GB, None)
    for place in outlook.macs:
        for found in place.cases:
            if found.plan is not None:
                low, high = found.tokens_per_second
                assert 0 < low <= high <= speed.WIDEST * low * (1 + 1e-9)
                assert found.prompt_seconds.low <= found.prompt_seconds.high


def test_a_faster_disk_is_faster() -> None:
    for memory in (20, 64, 400):
        for slow, fast in pairwise(cases(memory * GB, rate * GB) for rate in (2.0, 6.0, 13.0)):
            for one, other in zip(slow, fast, strict=True):
                assert other.tokens_per_second.low > one.tokens_per_second.low
                assert other.tokens_per_second.high > one.tokens_per_second.high
                assert other.prompt_seconds.high < one.prompt_seconds.high


def test_the_best_format_has_the_most_bits_that_cost_next_to_nothing() -> None:
    bf16, int8, int4 = cases(128 * GB, 13.6 * GB)
    assert bf16.tokens_per_second.high < 0.9 * int8.tokens_per_second.high
    assert 0.9 * int4.tokens_per_second.high < int8.tokens_per_second.high < int4.tokens_per_second.high
    assert best([bf16, int8, int4]) is int8
    for low, high in ((1.0, 0.8), (0.8, 1.0)):
        rates = int4.tokens_per_second
        slower = replace(int8, tokens_per_second=speed.Range(low * rates.low, high * rates.high))
        assert best([slower, int4]) is int4
    none = cases(5 * GB, GB)
    assert all(found.plan is None for found in none)
    assert best(none).format == "int4"


def test_weights_that_do_not_fit_are_paid_at_each_token() -> None:
    bf16, _, int4 = cases(64 * GB, 5.0 * GB)
    assert bf16.plan is not None
    read = bf16.plan.dense_bytes_per_pass
    assert read > 40 * GB
    seconds = (25_829_572_608 + read) / (5 * GB) + speed.MAC.other.low
    assert 1 / bf16.tokens_per_second.high == pytest.approx(seconds)
    assert int4.tokens_per_second.low > 2 * bf16.tokens_per_second.high


def test_a_prompt_reads_each_expert_once_a_pass() -> None:
    """Distinct experts of the specification's table, and a prompt of two passes and a bit."""
    assert [round(speed.distinct(RELEASED, n)) for n in (16, 32, 64, 128, 256, 512)] == [
        224,
        393,
        613,
        807,
        887,
        896,
    ]
    host = speed.Host(speed.Range(0, 0), speed.Range(0.1, 0.2), "")
    found = speed.prompt(RELEASED, 1000, 480, 10 * GB, 10 * GB, host)
    touched = 2 * speed.distinct(RELEASED, 480) + speed.distinct(RELEASED, 40)
    assert found.low == pytest.approx((92 * touched * 17_547_264 + 3 * 10 * GB) / (10 * GB) + 100)
    assert found.high == pytest.approx((found.low - 100) / 0.75 + 200)


def test_hit_rates() -> None:
    assert hits.hit_rates(5.9, 896) == (0.0, 0.0)
    assert hits.hit_rates(896, 896) == (1.0, 1.0)
    assert hits.hit_rates(20, 20) == (1.0, 1.0)
    rates = [hits.hit_rates(slots, 896) for slots in np.linspace(6, 895, 300)]
    for (low, high), (low2, high2) in pairwise(rates):
        assert 0 <= low <= low2 <= high2 <= 1
        assert high <= high2


@pytest.mark.slow
def test_the_curves_are_what_the_script_gives() -> None:
    replay = script("replay_cache")
    traces = [replay.synthetic(seed, 8, 300) for seed in range(6)]
    for share, worst, most, optimum in hits._CURVES[[4, 6, 9, 11, 13]]:
        found = [replay.hit_rates(trace, share) for trace in traces]
        assert min(rates["lru"] for rates in found) == pytest.approx(worst, abs=6e-4)
        assert max(rates["lru"] for rates in found) == pytest.approx(most, abs=6e-4)
        assert min(rates["belady"] for rates in found) == pytest.approx(optimum, abs=6e-4)
