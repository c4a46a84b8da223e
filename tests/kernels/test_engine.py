"""The MLX engine with every kernel emulated: k3-nano says the same as with plain operations."""

from __future__ import annotations

import pytest

import k3mlx
from k3mlx.kernels import Kernels

from .emulated import needs_emulator
from .emulator import Emulator
from .test_launch import needs_mlx

pytestmark = [needs_emulator, needs_mlx]
PROMPT = "Hello! Who are you, what can you do, and what did you learn from? Please say it in one sentence."
TOKENS = 4


def test_k3_nano_through_emulated_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from .emulator.mlx_maker import EmulatedMlxMaker

    with k3mlx.load(backend="mlx", device="cpu", dtype="float32") as engine:
        expected = k3mlx.generate(engine, prompt=PROMPT, max_tokens=TOKENS, thinking=False)
    emulator = Emulator(private_check=False)
    kernels = Kernels(EmulatedMlxMaker(emulator), note=pytest.fail)
    monkeypatch.setattr("k3mlx.model.backend.usable_kernels", lambda *rest: (kernels, []))
    with k3mlx.load(backend="mlx", device="cpu", dtype="float32") as engine:
        got = k3mlx.generate(engine, prompt=PROMPT, max_tokens=TOKENS, thinking=False)
        launched = engine.report()["parts"]
    assert got == expected
    assert got
    counters = kernels.counters
    assert all(counter.fallbacks == counter.failures == 0 for counter in counters.values())
    # six KDA layers a token; the prompt goes through the prefill kernel
    assert counters["kda_prefill"].calls == 6
    assert counters["kda_step"].calls % 6 == 0
    assert counters["kda_step"].calls >= 6 * (TOKENS - 2)
    assert counters["attn_res_mix"].calls > 17
    assert counters["route_topk"].calls > 7
    assert emulator.launches == sum(counter.calls for counter in counters.values())
    assert "kda_step" in str(launched)
