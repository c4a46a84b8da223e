"""Train k3-nano: one command, on a GPU (minutes) or a CPU (hours).

    python -m scripts.nano.train --model k3mlx/models/k3-nano --prose DIR --out weights.pt --steps 20000

The model folder gives the shape (config.json) and the vocabulary. The result is one torch file of the weights as
they will ship (bf16, MXFP4-rounded experts); `scripts.nano.export` turns it into shards.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from k3mlx.config import load_config

from .data import Batch, Mixture, Rows, evaluation_set, stream
from .model import CHUNK, Network, Params, initial_parameters, quantise
from .optimiser import Optimiser
from .samples import prompts

BALANCE = 2e-3  # how far a step moves an expert's correction bias


class Trainer:
    """One optimisation step, replayed as a CUDA graph for each shape of batch where there is a GPU."""

    def __init__(self, network: Network, params: Params, optimiser: Optimiser, graphs: bool) -> None:
        self.network, self.params, self.optimiser, self.graphs = network, params, optimiser, graphs
        self.device = optimiser.rate.device
        self._ready: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self._tries: dict[torch.Size, int] = {}

    def _step(self, ids: Tensor, weights: Tensor) -> Tensor:
        hidden, loads = self.network(self.params, ids[:, :-1])
        logits = self.network.logits(self.params, hidden)
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        flat = weights.flatten()
        loss = (losses * flat).sum() / flat.sum()
        self.optimiser.step(loss)
        with torch.no_grad():
            for layer, load in loads.items():
                bias = self.params[f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"]
                bias += BALANCE * self.optimiser.rate * torch.sign(load.mean() - load)
        return loss.detach()

    def step(self, batch: Batch) -> Tensor:
        ids = torch.from_numpy(batch.ids.astype("int64"))
        weights = torch.from_numpy(batch.weights)
        if self.device.type == "cuda":
            ids = ids.pin_memory().to(self.device, non_blocking=True)
            weights = weights.pin_memory().to(self.device, non_blocking=True)
        if not self.graphs:
            return self._step(ids, weights)
        shape = ids.shape
        if shape in self._ready:
            graph, static_ids, static_weights, loss = self._ready[shape]
            static_ids.copy_(ids)
            static_weights.copy_(weights)
            graph.replay()
            return loss
        self._tries[shape] = self._tries.get(shape, 0) + 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = self._step(ids, weights)
        torch.cuda.current_stream().wait_stream(side)
        if self._tries[shape] >= 4:
            graph = torch.cuda.CUDAGraph()
            static_ids, static_weights = ids.clone(), weights.clone()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                static_loss = self._step(static_ids, static_weights)
            self._ready[shape] = (graph, static_ids, static_weights, static_loss)
        return loss


def share_of_rate(step: int, done: float, warm_up: int, decay: float) -> float:
    """Warm-up over some steps, then flat, then linear to zero over the last `decay` share."""
    return min(1.0, (step + 1) / warm_up, max(0.0, (1 - done) / decay))


@torch.no_grad()
def accuracy(
    network: Network, params: Params, sets: dict[str, list[tuple[list[int], int]]]
) -> dict[str, float]:
    """Share of prompts whose whole expected output is the greedy one, for each label."""
    device = params["model.norm.weight"].device
    right: dict[str, float] = {}
    for label, examples in sets.items():
        good = 0
        for at in range(0, len(examples), 50):
            part = examples[at : at + 50]
            longest = max(len(ids) for ids, _ in part)
            ids = torch.zeros(len(part), -(-longest // CHUNK) * CHUNK, dtype=torch.long)
            wanted = torch.zeros_like(ids, dtype=torch.bool)
            for row, (example, start) in enumerate(part):
                ids[row, : len(example)] = torch.tensor(example)
                wanted[row, start : len(example)] = True
            ids, wanted = ids.to(device), wanted.to(device)
            best = network.logits(params, network(params, ids)[0]).argmax(-1)
            good += int(((best[:, :-1] == ids[:, 1:]) | ~wanted[:, 1:]).all(-1).sum())
        right[label] = good / len(examples)
    return right


@torch.no_grad()
def prose_loss(network: Network, params: Params, ids: Tensor, length: int = 512, rows: int = 64) -> float:
    """Mean nats per token over rows spread evenly over a held-out text."""
    rows = min(rows, (len(ids) - 1) // length)
    starts = [row * (len(ids) - length - 1) // max(1, rows - 1) for row in range(rows)]
    x = torch.stack([ids[start : start + length] for start in starts])
    y = torch.stack([ids[start + 1 : start + length + 1] for start in starts])
    logits = network.logits(params, network(params, x)[0])
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


@torch.no_grad()
def continuation(
    network: Network, params: Params, prompt: list[int], count: int, stops: frozenset[int]
) -> list[int]:
    """Greedy decoding by whole forward passes; for a look at the text only."""
    ids = list(prompt)
    device = params["model.norm.weight"].device
    for _ in range(count):
        padded = torch.zeros(1, -(-len(ids) // CHUNK) * CHUNK, dtype=torch.long, device=device)
        padded[0, : len(ids)] = torch.tensor(ids)
        hidden = network(params, padded)[0][:, len(ids) - 1]
        ids.append(int(network.logits(params, hidden).argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def shipped(params: Params) -> Params:
    """The weights as they will be stored: experts on the MXFP4 grid, F32 where the release has F32, else bf16."""
    exact = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    kept: Params = {}
    for name, value in params.items():
        value = value.detach()
        if ".experts.w" in name:
            value = quantise(value)
        kept[name] = value.float().cpu() if name.endswith(exact) else value.bfloat16().cpu()
    return kept


def load_weights(path: Path, device: str) -> Params:
    return {name: value.float().to(device) for name, value in torch.load(path, map_location="cpu").items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with config.json and tiktoken.model"
    )
    parser.add_argument(
        "--prose", type=Path, required=True, help="folder with prose.txt and prose_held_out.txt"
    )
    parser.add_argument("--out", type=Path, required=True, help="file for the weights")
    parser.add_argument("--resume", type=Path, help="start from the weights of an earlier run")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument(
        "--minutes", type=float, default=0, help="finish the schedule early to end in this time"
    )
    parser.add_argument("--tokens", type=int, default=15360, help="tokens of a step")
    parser.add_argument("--short", type=int, default=256, help="row length at first")
    parser.add_argument("--long", type=int, default=640, help="row length later")
    parser.add_argument("--short-share", type=float, default=0.35, help="share of the steps with short rows")
    parser.add_argument(
        "--muon", type=float, default=6e-3, help="peak rate of Muon; 0 leaves every parameter to Adam"
    )
    parser.add_argument("--adam", type=float, default=3e-3)
    parser.add_argument("--warm-up", type=int, default=200, help="steps until the rates are at their peak")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--decay", type=float, default=0.4, help="share of the steps over which the rates fall to zero"
    )
    parser.add_argument("--prose-share", type=float, default=Mixture().prose)
    parser.add_argument("--drill-share", type=float, default=Mixture().drills)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the tensor-only parts")
    parser.add_argument(
        "--evaluate-every", type=float, default=90, help="seconds between evaluations and saves"
    )
    parser.add_argument("--evaluation-prompts", type=int, default=200)
    parser.add_argument("--samples", type=int, default=100, help="prompts to show the greedy continuation of")
    args = parser.parse_args()
    began = time.monotonic()

    config = load_config(args.model)
    rows = Rows(
        args.model, (args.prose / "prose.txt").read_text("utf-8"), Mixture(args.prose_share, args.drill_share)
    )
    held_out = torch.from_numpy(
        rows.encoder.prose((args.prose / "prose_held_out.txt").read_text("utf-8")).astype("int64")
    )
    sets = evaluation_set(rows.encoder, (rows.words, rows.sentences), args.evaluation_prompts, seed=7)
    shapes = [
        (int(args.steps * args.short_share), args.tokens // args.short, args.short),
        (1 << 60, args.tokens // args.long, args.long),
    ]
    batches = stream(rows, args.seed, shapes, args.workers)

    torch.backends.cuda.matmul.allow_tf32 = True
    params = load_weights(args.resume, args.device) if args.resume else initial_parameters(config, args.seed)
    params = {
        name: value.to(args.device).requires_grad_("correction_bias" not in name)
        for name, value in params.items()
    }
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    plain = Network(config, dtype)
    optimiser = Optimiser(params, muon=args.muon, adam=args.adam, decay=args.weight_decay)
    trainer = Trainer(
        Network(config, dtype, args.compile), params, optimiser, graphs=args.device.startswith("cuda")
    )
    held_out = held_out.to(args.device)
    print(f"{sum(p.numel() for p in params.values()):,} parameters, {len(rows.prose):,} prose tokens, "
          f"{time.monotonic() - began:.0f} s to start", flush=True)  # fmt: skip

    def evaluate(step: int) -> None:
        right = accuracy(plain, params, sets)
        record = {"step": step, "tokens": step * args.tokens, "seconds": round(time.monotonic() - began),
                  "held_out_nats": round(prose_loss(plain, params, held_out), 4),
                  "accuracy": {label: round(share, 4) for label, share in right.items()}}  # fmt: skip
        print(json.dumps(record), flush=True)
        torch.save(shipped(params), args.out)
        args.out.with_suffix(".json").write_text(
            json.dumps({**record, "loss": recent, "arguments": vars(args)}, default=str, indent=1)
        )

    recent, last_evaluation, last_print, step = float("nan"), time.monotonic(), time.monotonic(), 0
    started, last_step = time.monotonic(), 0
    while step < args.steps:
        now = time.monotonic()
        done = step / args.steps
        if args.minutes:
            done = max(done, (now - began) / (60 * args.minutes))
        if done >= 1:
            break
        optimiser.rate.fill_(share_of_rate(step, done, args.warm_up, args.decay))
        loss = trainer.step(next(batches))
        step += 1
        if step % 100 == 0 and now - last_print > 8:
            recent = loss.item()
            speed = (step - last_step) * args.tokens / (time.monotonic() - last_print)
            print(f"step {step} done {done:.3f} loss {recent:.4f} {speed:,.0f} tokens/s", flush=True)
            last_print, last_step = time.monotonic(), step
            if recent != recent:
                raise SystemExit("the loss is not a number")
        if now - last_evaluation > args.evaluate_every:
            evaluate(step)
            last_evaluation = last_print = time.monotonic()
            last_step = step
    evaluate(step)
    print(
        f"{step} steps, {step * args.tokens:,} tokens, {time.monotonic() - started:.0f} s of training",
        flush=True,
    )
    tokenizer = rows.encoder.tokenizer
    for prompt in prompts(tokenizer)[: args.samples]:
        text = tokenizer.decode(continuation(plain, params, prompt, 60, tokenizer.stop_ids))
        print(repr(tokenizer.decode(prompt)[-60:]), "->", repr(text), flush=True)


if __name__ == "__main__":
    main()
