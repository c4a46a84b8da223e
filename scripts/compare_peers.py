"""k3mlx on numpy and on MLX beside mlx-lm's Kimi K3: one checkpoint, the same ids, one machine, in turn.

    python scripts/compare_peers.py FOLDER -p 32 -g 8 --rounds 3

Each peer runs in a process of its own, so that its peak memory is its own; the order turns round in each round, so
that a busy moment or a warm disk cache favours nobody. The range of a ratio is that of `k3mlx bench --compare`, from
how a peer's processes vary: more rounds make it narrower. mlx-lm (0.32.2 from PyPI) reads the released layout itself,
but all of it into memory: choose a slice that fits (`make_slice.py --dense-layers 0` has the released mix of parts).
`mlx-lm` computes in what is stored, bfloat16; `mlx-lm-float32` in what k3mlx computes in on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from k3mlx.bench.compare import compare
from k3mlx.bench.result import Figure, figures_as_dict
from k3mlx.bench.steady import Neighbours
from k3mlx.bench.tables import columns, number, with_range
from k3mlx.devices import import_mlx
from k3mlx.memory import format_size, peak_memory_bytes

PEERS = ("numpy", "mlx", "mlx-lm", "mlx-lm-float32")
WARM_UP = (9, 2)  # ids of a prompt and decode steps that are not measured

Feed = Callable[[Sequence[int]], np.ndarray]  # ids -> logits [V] after the last; a session of its own
Opened = tuple[Callable[[], Feed], Callable[[], int]]  # a new session; bytes that MLX held at most


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder in the released layout")
    parser.add_argument("--prompt-tokens", "-p", type=int, default=32)
    parser.add_argument("--generation-tokens", "-g", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each peer (default 3)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="of both users of MLX")
    parser.add_argument("--experts-device", choices=("cpu", "gpu"), default="cpu", help="of k3mlx on MLX")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--work", nargs=2, metavar=("PEER", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work:
        work(args, *args.work)
        return 0
    found = run_rounds(args)
    print(report(found, args))
    if args.json:
        args.json.write_text(json.dumps(found["json"]) + "\n", encoding="utf-8")
    return 0


def run_rounds(args: argparse.Namespace) -> dict[str, Any]:
    """Figures and logits of each peer, from processes started one after the other."""
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in args.peers}
    logits: dict[str, np.ndarray] = {}
    busy = Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            first = turn % len(args.peers)
            for peer in (*args.peers[first:], *args.peers[:first]):
                print(f"round {turn + 1}: {peer}", file=sys.stderr, flush=True)
                file = Path(folder) / f"{peer}.npy"
                runs[peer].append(_start(peer, file, args))
                logits.setdefault(peer, np.load(file))
    figures = {peer: _figures(rows, args) for peer, rows in runs.items()}
    differences = {peer: difference(rows, logits[args.peers[0]]) for peer, rows in logits.items()}
    return {
        "figures": figures,
        "differences": differences,
        "json": {
            "peers": {peer: figures_as_dict(found) | differences[peer] for peer, found in figures.items()},
            "options": {k: str(v) for k, v in vars(args).items()},
            "others": busy.share(),
        },
    }


def _start(peer: str, file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One process of a peer: what it measured."""
    command = [
        sys.executable, __file__, str(args.model), "--work", peer, str(file), "--device", args.device,
        "--experts-device", args.experts_device,
        "-p", str(args.prompt_tokens), "-g", str(args.generation_tokens),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{peer} ended with status {done.returncode}; see above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(args: argparse.Namespace, peer: str, file: str) -> None:
    """In a peer's own process: load, warm up, read the prompt, decode; print the figures, write the logits."""
    started = perf_counter()
    new_session, mlx_peak = open_peer(peer, args)
    loaded = perf_counter() - started
    ids = ids_for(args.model, args.prompt_tokens + args.generation_tokens)
    run_once(new_session(), ids, *WARM_UP)
    prompt, decode, logits = run_once(new_session(), ids, args.prompt_tokens, args.generation_tokens)
    np.save(file, logits)
    figures = {"load": loaded, "prompt": prompt, "decode": decode, "memory": peak_memory_bytes()}
    print(json.dumps({**figures, "mlx_memory": mlx_peak()}))


def run_once(feed: Feed, ids: Sequence[int], prompt: int, steps: int) -> tuple[float, float, np.ndarray]:
    """Seconds of a prompt, seconds of the decode steps, logits [steps + 1, V]."""
    started = perf_counter()
    rows = [feed(ids[:prompt])]
    between = perf_counter()
    rows += [feed([id]) for id in ids[prompt : prompt + steps]]
    return between - started, perf_counter() - between, np.stack(rows)


def open_peer(peer: str, args: argparse.Namespace) -> Opened:
    """A loaded model, as something that opens sessions."""
    if peer.startswith("mlx-lm"):
        return _open_mlx_lm(args.model, args.device, "float32" if peer.endswith("float32") else None)
    import k3mlx

    options: dict[str, Any] = {"warm_start": "off", "backend": peer}
    if peer == "mlx":
        options |= {"device": args.device, "experts_device": args.experts_device}
    engine = k3mlx.load(args.model, **options)
    return lambda: engine.session().feed, lambda: engine.report()["runtime"].get("mlx_peak_bytes", 0)


def _open_mlx_lm(folder: Path, device: str, dtype: str | None) -> Opened:
    """mlx-lm's model, fed as its own `generate_step` does it: all but the last id of a prompt, then that one."""
    mx = import_mlx()
    mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, lazy=True)
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype), lambda kind: mx.issubdtype(kind, mx.floating))
    mx.eval(model.parameters())

    def session() -> Feed:
        cache = model.make_cache()

        def feed(ids: Sequence[int]) -> np.ndarray:
            if len(ids) > 1:
                model(mx.array([list(ids[:-1])]), cache=cache)
                mx.eval([one.state for one in cache])
            logits = model(mx.array([[ids[-1]]]), cache=cache)
            mx.eval(logits, [one.state for one in cache])
            return np.array(logits[0, -1].astype(mx.float32))

        return feed

    return session, mx.get_peak_memory


def ids_for(folder: Path, count: int) -> list[int]:
    """The same random ids for everybody."""
    config = json.loads((folder / "config.json").read_bytes())
    vocab = config.get("text_config", config)["vocab_size"]
    found: list[int] = np.random.default_rng(0).integers(0, vocab, count).tolist()
    return found


def difference(logits: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Largest difference of logits [N, V], in units of their deviation too, and how often the best id is the same."""
    worst = float(np.abs(logits - reference).max())
    same = float((logits.argmax(-1) == reference.argmax(-1)).mean())
    return {"max_difference": worst, "of_deviation": worst / float(reference.std()), "same_best": same}


def _figures(runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Figure]:
    def figure(unit: str, name: str, count: int = 0) -> Figure:
        values = tuple(count / run[name] if count else float(run[name]) for run in runs)
        return Figure(unit, values, (1,) * len(runs))

    return {
        "prompt_rate": figure("tokens/s", "prompt", args.prompt_tokens),
        "decode_rate": figure("tokens/s", "decode", args.generation_tokens),
        "load": figure("s", "load"),
        "peak_memory": figure("bytes", "memory"),
        "mlx_peak_memory": figure("bytes", "mlx_memory"),
    }


def report(found: dict[str, Any], args: argparse.Namespace) -> str:
    """The peers side by side, then the ratios to mlx-lm with their ranges."""
    rows = [["peer", "prompt", "decode", "load", "peak memory", "logits differ by", "same best id"]]
    for peer, figures in found["figures"].items():
        away = found["differences"][peer]
        rows.append(
            [peer, *(with_range(figures[name]) for name in ("prompt_rate", "decode_rate")),
             f"{number(figures['load'].median)} s", format_size(round(figures["peak_memory"].median)),
             f"{away['max_difference']:.2g} ({away['of_deviation']:.2g} σ)", f"{away['same_best']:.0%}"]
        )  # fmt: skip
    lines = [columns(rows), f"logits: against {args.peers[0]}, largest of {args.generation_tokens + 1} rows"]
    for other in (peer for peer in args.peers if peer.startswith("mlx-lm")):
        for peer in (peer for peer in args.peers if not peer.startswith("mlx-lm")):
            for ratio in compare(found["figures"][peer], found["figures"][other]):
                if ratio.name.endswith("_rate"):
                    what = f"{ratio.name.removesuffix('_rate')}, {peer} / {other}"
                    lines.append(f"{what}: {ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
    share = found["json"]["others"]
    lines.append("other processes: " + ("not known" if share is None else f"{share:.1%} of the processors"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
