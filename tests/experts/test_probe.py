"""The choice between direct and buffered reads, and the rate of plain reads."""

import threading

import pytest

from k3mlx.errors import ModelFilesError
from k3mlx.experts import probe
from k3mlx.experts.files import ExpertFiles, direct_supported
from k3mlx.experts.layout import ExpertLayout
from k3mlx.experts.options import StreamOptions
from k3mlx.experts.probe import DirectChoice, choose_direct, read_rate
from k3mlx.experts.store import ExpertStore

from .models import nothing_left_behind

needs_direct = pytest.mark.skipif(not direct_supported(), reason="this system has no direct reads")


@pytest.fixture
def worth_probing(monkeypatch):
    monkeypatch.setattr(probe, "PROBE_MIN_BYTES", 0)


def with_rates(monkeypatch, direct, buffered):
    """Have the probe measure these rates; a rate may be an error."""

    def measured(files, placements, slot_bytes, threads, memories=None):
        rate = direct if files.direct else buffered
        if isinstance(rate, Exception):
            raise rate
        return rate, 1.0

    monkeypatch.setattr(probe, "read_rate", measured)


def test_small_models_are_read_through_the_page_cache_unprobed(checkpoint, monkeypatch):
    with_rates(monkeypatch, AssertionError("probed"), AssertionError("probed"))
    assert choose_direct(ExpertLayout(checkpoint), checkpoint.stamps, 2) == DirectChoice(False)


@needs_direct
@pytest.mark.parametrize(
    ("direct", "buffered", "chosen"),
    [(2e9, 1e9, True), (1e9, 1e9, True), (1e9, 1.05e9, True), (1e9, 2e9, False)],
)
def test_the_faster_way_is_taken(checkpoint, worth_probing, monkeypatch, direct, buffered, chosen):
    with_rates(monkeypatch, direct, buffered)
    assert choose_direct(ExpertLayout(checkpoint), checkpoint.stamps, 2) == (chosen, direct, buffered)
    store = ExpertStore(checkpoint, None, StreamOptions())
    assert store.files.direct is chosen
    assert store.report()["direct_io"] is chosen
    store.close()


@needs_direct
def test_a_file_system_without_direct_reads(checkpoint, worth_probing, monkeypatch):
    with_rates(monkeypatch, ModelFilesError("cannot be opened (Invalid argument)"), 1e9)
    assert not choose_direct(ExpertLayout(checkpoint), checkpoint.stamps, 2).direct


@needs_direct
def test_a_probe_of_this_disk_leaves_nothing_behind(checkpoint, worth_probing):
    threads = threading.active_count()
    with nothing_left_behind():
        choice = choose_direct(ExpertLayout(checkpoint), checkpoint.stamps, 3)
    assert choice.direct_rate > 0
    assert choice.buffered_rate > 0
    assert threading.active_count() == threads


def test_the_rate_counts_every_byte_once_and_errors_are_raised(checkpoint, monkeypatch):
    layout = ExpertLayout(checkpoint)
    places = [layout.place(1, expert) for expert in range(9)]
    files, read = ExpertFiles(checkpoint.stamps), []
    whole = files.read
    monkeypatch.setattr(files, "read", lambda *args: (read.append(args[2]), whole(*args)))
    rate, seconds = read_rate(files, places, layout.slot_bytes, 3)
    assert sum(read) == 9 * layout.payload == pytest.approx(rate * seconds)

    def fail(*args):
        raise ModelFilesError("gone")

    monkeypatch.setattr(files, "read", fail)
    with pytest.raises(ModelFilesError, match="gone"):
        read_rate(files, places, layout.slot_bytes, 3)
    files.close()
