"""The watchdog: when it strikes, what it says, what it leaves behind."""

import json
import time
from pathlib import Path

import pytest

from k3mlx.watchdog import Watchdog, save_ids


def test_late_work_ends_the_process_with_the_ids():
    said = []
    watchdog = Watchdog(scale=0.001, end=said.append)
    watchdog.ids = [5, 6, 7]
    with watchdog.watch("layer 3: experts", 10):
        watchdog.check()
        assert said == []
        time.sleep(0.05)
        watchdog.check()
    assert len(said) == 1
    assert said[0].startswith("k3mlx: error: layer 3: experts did not return within 0.01 s")
    path = Path(said[0].rsplit(" ", 1)[-1])
    assert json.loads(path.read_text()) == [5, 6, 7]
    path.unlink()


def test_work_that_is_done_is_not_late():
    said = []
    watchdog = Watchdog(scale=0.001, end=said.append)
    with watchdog.watch("quick", 1):
        pass
    with pytest.raises(ValueError, match="own"), watchdog.watch("raises", 1):
        raise ValueError("its own")
    time.sleep(0.01)
    watchdog.check()
    assert said == []


def test_saved_ids_are_private():
    path = save_ids([1])
    assert path.stat().st_mode & 0o077 == 0
    path.unlink()
