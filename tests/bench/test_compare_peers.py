"""`scripts/compare_peers.py`: order of its processes, what it makes of them, all peers on a small checkpoint."""

import argparse
import json

import numpy as np
import pytest

from tests.scripts_at import script

peers = script("compare_peers")
LOGITS = {"numpy": [[0.0, 1.0], [2.0, 1.0]], "mlx": [[0.0, 1.5], [0.0, 1.0]]}


def arguments(**changed):
    return argparse.Namespace(
        **{"model": None, "prompt_tokens": 6, "generation_tokens": 2, "rounds": 3, "peers": ("numpy", "mlx"),
           "device": "cpu", "experts_device": "cpu"} | changed
    )  # fmt: skip


@pytest.fixture
def started(monkeypatch):
    """The peers in the order of their processes, which take 2 and 4 seconds for a prompt and 1 to decode."""
    order = []

    def start(peer, file, args):
        order.append(peer)
        np.save(file, np.array(LOGITS[peer]) + len(order) // 3)  # of later rounds: not the ones to show
        seconds = {"numpy": 2.0, "mlx": 4.0}[peer]
        return {"load": 1.0, "prompt": seconds, "decode": 1.0, "memory": 10**9, "mlx_memory": 0}

    monkeypatch.setattr(peers, "_start", start)
    return order


def test_each_round_begins_with_another_peer(started):
    peers.run_rounds(arguments())
    assert started == ["numpy", "mlx", "mlx", "numpy", "numpy", "mlx"]


def test_rates_and_differences(started):
    args = arguments()
    found = peers.run_rounds(args)
    assert found["figures"]["numpy"]["prompt_rate"].values == (3.0,) * 3
    assert found["figures"]["mlx"]["prompt_rate"].values == (1.5,) * 3
    assert found["figures"]["mlx"]["decode_rate"].values == (2.0,) * 3
    away = found["differences"]["mlx"]
    assert away["max_difference"] == 2.0
    assert away["of_deviation"] == pytest.approx(2.0 / np.std(LOGITS["numpy"]))
    assert away["same_best"] == 0.5
    assert found["differences"]["numpy"]["max_difference"] == 0.0
    assert json.loads(json.dumps(found["json"]))["peers"]["mlx"]["same_best"] == 0.5
    rows = peers.report(found, args).splitlines()
    assert rows[2].startswith("mlx ")
    assert rows[2].endswith("50%")


def test_ratios_are_of_this_over_mlx_lm(started, monkeypatch):
    monkeypatch.setitem(LOGITS, "mlx-lm", LOGITS["mlx"])
    start = peers._start
    monkeypatch.setattr(
        peers, "_start", lambda peer, file, args: start("mlx" if peer == "mlx-lm" else peer, file, args)
    )
    args = arguments(peers=("numpy", "mlx-lm"))
    assert "prompt, numpy / mlx-lm: 2.00 (2.00 to 2.00)" in peers.report(peers.run_rounds(args), args)


def test_a_session_is_fed_a_prompt_and_then_one_id_at_a_time():
    fed = []
    *seconds, logits = peers.run_once(
        lambda ids: fed.append(list(ids)) or np.array([len(fed)]), range(5), 3, 2
    )
    assert fed == [[0, 1, 2], [3], [4]]
    assert logits.tolist() == [[1], [2], [3]]
    assert min(seconds) >= 0


def test_a_peer_that_fails_ends_it(tmp_path):
    with pytest.raises(SystemExit, match="numpy ended with status"):
        peers.main([str(tmp_path / "none"), "--peers", "numpy", "--rounds", "1"])


@pytest.mark.slow
def test_all_peers_agree_on_a_small_checkpoint(tmp_path, capsys):
    """mlx-lm's model reads the released layout: an implementation by others, in float32 equal to rounding."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    slices = script("make_slice")
    folder, result = tmp_path / "slice", tmp_path / "peers.json"
    slices.write_slice(folder, slices.slice_config(3, 24, 256, width=16, dense=0))
    assert peers.main([str(folder), "-p", "12", "-g", "3", "--rounds", "2", "--json", str(result)]) == 0
    found = json.loads(result.read_bytes())["peers"]
    assert found.keys() == set(peers.PEERS)
    for peer, figures in found.items():
        assert figures["of_deviation"] < (0.2 if peer == "mlx-lm" else 1e-4), peer  # it computes in bfloat16
        assert len(figures["decode_rate"]["values"]) == 2
        assert figures["decode_rate"]["low"] > 0
    printed = capsys.readouterr().out
    assert all(f"decode, {ours} / mlx-lm: " in printed for ours in ("numpy", "mlx"))
