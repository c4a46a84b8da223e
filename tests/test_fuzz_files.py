"""Random and mutated headers, indexes and configs: a K3Error or a model that can be read, nothing else.

Some hundred examples by default. `K3MLX_FUZZ_SECONDS=600 pytest -m slow tests/test_fuzz_files.py` goes on with
new seeds for that long.
"""

import copy
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from k3mlx.checkpoint.mlx_lm import open_checkpoint
from k3mlx.checkpoint.safetensors import read_header
from k3mlx.checkpoint.snapshot import read_tensor
from k3mlx.checkpoint.writer import INDEX_NAME
from k3mlx.config import load_config
from k3mlx.errors import K3Error
from tests import tiny

# A failing example may be a whole file; its text form is long, and that is no reason not to show it.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

FUZZ_SECONDS = float(os.environ.get("K3MLX_FUZZ_SECONDS", "20"))

INTERESTING = [
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        31,
        32,
        33,
        1 << 20,
        1 << 31,
        1 << 32,
        (1 << 53) + 1,
        1 << 62,
        1 << 63,
        1 << 64,
        10**40,
    ),
    *(0.5, 1.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), True, False, None, "", "0", "\0", "\ud800"),
    *("U8", "F32", "BF16", "F64", "I8", "../x.safetensors", "/x.safetensors", "model.safetensors", "x" * 300),
    *([], [0], [0, 0], [1, 0], [[]], {}, {"": 0}, [1] * 40, "nest"),
]
NEST_HERE = b'"nest"'
JSON = st.recursive(
    st.one_of(st.sampled_from(INTERESTING), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)

NESTS = st.builds(  # as deep as Python can go, and a little less and more
    lambda depth, opened, closed: opened * depth + b"1" + closed * depth,
    st.one_of(st.integers(0, 1100), st.just(20_000)),
    st.sampled_from([b"[", b'{"a":']),
    st.sampled_from([b"]", b"}", b""]),
)


def containers(document: Any) -> list[Any]:
    """Every object and non-empty list in a JSON document, itself first."""
    found = [document] if isinstance(document, (dict, list)) and document else []
    for value in (
        document.values() if isinstance(document, dict) else document if isinstance(document, list) else []
    ):
        found += containers(value)
    return found


@st.composite
def mutated_json(draw: st.DrawFn, original: dict) -> bytes:
    """A document with a few values replaced, removed, renamed or moved, and sometimes bytes damaged."""
    document = copy.deepcopy(original)
    for _ in range(draw(st.integers(0, 3))):
        places = containers(document)
        if not places:
            break
        place = draw(st.sampled_from(places))
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        action = draw(st.sampled_from(["replace", "replace", "nudge", "remove", "copy"]))
        if action == "remove":
            del place[key]
        elif action == "nudge" and type(place[key]) is int:
            place[key] += draw(st.sampled_from([-33, -2, -1, 1, 2, 31, 1 << 40]))
        elif action == "copy" and isinstance(place, dict):
            place[draw(st.sampled_from(list(place)))] = place[key]
        else:
            place[key] = copy.deepcopy(draw(JSON))  # a later mutation may change it
    text = json.dumps(document).encode()
    if draw(st.booleans()):
        return text.replace(NEST_HERE, draw(NESTS))
    return draw(mutated_bytes(text))


@st.composite
def mutated_bytes(draw: st.DrawFn, original: bytes) -> bytes:
    """Bytes with some pieces overwritten, inserted or cut out."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 12)))
        piece = st.one_of(st.binary(max_size=8), st.sampled_from([b"9" * 5000, b"{}", b'"']), NESTS)
        data[start:end] = draw(piece)
    return bytes(data)


def message_of(action: Callable[[], object]) -> str | None:
    """What the one kind of error allowed says, or None when there is none."""
    try:
        action()
    except K3Error as error:
        return str(error)
    return None


class Target:
    """A small complete model on disk, whose files are overwritten one at a time."""

    def __init__(self, folder: Path) -> None:
        linear = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 1}
        self.config = tiny.config_dict(
            num_hidden_layers=2,
            num_experts=2,
            vocab_size=7,
            hidden_size=5,
            num_attention_heads=1,
            num_key_value_heads=1,
            linear_attn_config=linear,
        )
        rng = np.random.default_rng(0)
        self.folder = tiny.write_random_model(folder, self.config, rng, shards=2)
        self.shard = folder / "model-00002-of-000002.safetensors"
        self.kept = {path: path.read_bytes() for path in folder.iterdir()}
        content = self.kept[self.shard]
        self.head = 8 + int.from_bytes(content[:8], "little")
        self.header = json.loads(content[8 : self.head])
        self.index = json.loads(self.kept[folder / INDEX_NAME])

    def open_with(self, path: Path, data: bytes) -> None:
        """Open the model with one file replaced; it must fail cleanly or be readable to the last tensor."""
        path.write_bytes(data)
        try:
            message = message_of(self.read_all)
        finally:
            path.write_bytes(self.kept[path])
        assert message is None or 0 < len(message) < 20_000
        assert message is None or len(message.splitlines()) <= 11

    def read_all(self) -> None:
        with open_checkpoint(self.folder) as checkpoint:
            for name in checkpoint.tensors:
                checkpoint.raw(name)
            for layer in filter(checkpoint.config.is_moe, range(checkpoint.config.num_hidden_layers)):
                checkpoint.expert_spans(layer, 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("fuzz"))


def check_header(target: Target, header: bytes) -> None:
    data = len(header).to_bytes(8, "little") + header + target.kept[target.shard][target.head :]
    target.open_with(target.shard, data)


def check_file(target: Target, data: bytes) -> None:
    path = target.folder.parent / "alone.safetensors"
    path.write_bytes(data)

    def read_all() -> None:
        for info in read_header(path).tensors.values():
            assert info.offset + info.nbytes <= len(data)
            read_tensor(info)

    message = message_of(read_all)
    assert message is None or str(path) in message


def check_index(target: Target, data: bytes) -> None:
    target.open_with(target.folder / INDEX_NAME, data)


def check_config(target: Target, data: bytes) -> None:
    target.open_with(target.folder / "config.json", data)


def check_bare_config(target: Target, data: bytes) -> None:
    path = target.folder.parent / "config.json"
    path.write_bytes(data)
    message = message_of(lambda: load_config(path.parent))
    assert message is None or str(path) in message


Check = tuple[Callable[[Target, bytes], None], Callable[[Target], st.SearchStrategy[bytes]]]

CHECKS: dict[str, Check] = {
    "header": (check_header, lambda target: mutated_json(target.header)),
    "file": (check_file, lambda target: mutated_bytes(target.kept[target.shard])),
    "small file": (check_file, lambda target: st.binary(max_size=40)),
    "index": (check_index, lambda target: mutated_json(target.index)),
    "config": (check_config, lambda target: mutated_json(target.config)),
    "bare config": (check_bare_config, lambda target: mutated_json(target.config["text_config"])),
}


def fuzz(target: Target, name: str, examples: int, start: int) -> None:
    check, data = CHECKS[name]

    @seed(start)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(data(target))
    def run(mutated: bytes) -> None:
        check(target, mutated)

    run()


@pytest.mark.parametrize("name", CHECKS)
def test_only_clean_errors(target: Target, name: str) -> None:
    fuzz(target, name, examples=100, start=1)


@pytest.mark.slow
def test_only_clean_errors_for_long(target: Target) -> None:
    end = time.monotonic() + FUZZ_SECONDS
    seeds = random.SystemRandom()
    rounds = 0
    while time.monotonic() < end:
        for name in CHECKS:
            start = seeds.getrandbits(32)
            try:
                fuzz(target, name, examples=300, start=start)
            except BaseException:
                print(f"seed {start}, {name}")
                raise
        rounds += 1
    print(f"{rounds} rounds of {300 * len(CHECKS)} examples in {FUZZ_SECONDS:.0f} s")
