"""The order of the checks, and which of them make sense after what was found before.

Owns no check. Findings come one by one, as they are made.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import trial
from .findings import FATAL, Finding, ok
from .packages import check_packages, look_at_packages
from .system import System, check_system, look_at_system

if TYPE_CHECKING:
    from k3mlx.checkpoint.snapshot import Checkpoint
    from k3mlx.config import ModelConfig
    from k3mlx.devices import Choice


@dataclass(frozen=True)
class Options:
    """What to look at; fields as the keywords of `k3mlx.load`. memory: bytes, None for what there is."""

    model: str | None = None
    backend: str = "auto"
    device: str = "auto"
    memory: int | None = None
    model_dirs: Sequence[Path] = ()
    selftest: bool = False


def diagnose(options: Options) -> Iterator[Finding]:
    """Look at this machine, then at the model. What is wrong with either is a finding, not an error."""
    system = look_at_system()
    yield from check_system(system)
    packages = list(check_packages(look_at_packages()))
    yield from packages
    if any(finding.level == FATAL for finding in packages):
        yield ok("stopped", "the rest cannot be looked at without these packages")
        return
    choice = yield from _software(options, system)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        run = pool.submit(trial.run_trial, options.backend, options.device) if choice else None
        checkpoint = yield from _model(options, choice, system, stack)
        if choice and run:
            yield from trial.check_trial(run.result())
            yield _verdict(choice)
        if checkpoint is not None:  # last, when nothing else runs
            yield _rate(checkpoint)


def _software(options: Options, system: System) -> Generator[Finding, None, Choice | None]:
    """Settings, libraries, devices and kernels; returns backend and device of a run, None if there is none."""
    from . import kernels, packages

    yield from packages.check_settings(os.environ, packages.setting_readers())
    mlx = packages.look_at_mlx()
    yield packages.check_mlx(mlx, packages.mlx_device_info() if mlx.version else None, system.platform)
    yield packages.check_blas(packages.look_at_blas(), system.cores)
    yield kernels.check_cpu_kernels(kernels.look_at_cpu_kernels())
    choice, found = packages.check_choice(options.backend, options.device)
    yield found
    if choice is not None and options.selftest:
        yield kernels.check_selftest(kernels.run_selftest(choice))
    return choice


def _verdict(choice: Choice) -> Finding:
    """On the GPU's kernels; a run that has just been made has left one if there was none."""
    from k3mlx.selftest import remembered

    from .kernels import check_gpu_kernels

    return check_gpu_kernels(choice.device, remembered(choice.device))


def _model(
    options: Options, choice: Choice | None, system: System, stack: ExitStack
) -> Generator[Finding, None, Checkpoint | None]:
    """Disks, then the model's files, vocabulary and memory, as far as it is there.

    Returns the checkpoint, which is closed with `stack`, None if it cannot be opened.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    from k3mlx.checkpoint.hub import resolve
    from k3mlx.errors import K3Error
    from k3mlx.experts.warm import user_cache

    from . import disks, files

    places = [("Hugging Face cache", Path(HF_HUB_CACHE)), ("verdicts and lists", user_cache())]
    try:
        folder = resolve(options.model)
    except K3Error as error:
        yield from disks.check_disks(disks.look_at_disks(places))
        yield files.check_model(error)
        return None
    folders = [folder, *options.model_dirs]
    places += [("model", path) for path in folders]
    yield from disks.check_disks(disks.look_at_disks(places))
    commands = files.commands_for(folder)
    own = commands.remake or commands.fetch
    states = files.look_at_files(folders)
    yield from files.check_files(states, own)
    yield from files.check_partial(files.find_partial(folder), commands.fetch)
    opened = files.open_model(folder, options.model_dirs)
    if isinstance(opened, K3Error):
        yield from files.check_census(opened, folder, states, commands)
        yield from _text(folder, files.read_config(folder), own)
        return None
    stack.callback(opened.close)
    yield files.census_line(opened)
    yield from _text(folder, opened.config, own)
    if choice is not None:
        yield from _memory(options, choice, system, opened)
    return opened


def _text(folder: Path, config: ModelConfig | None, own: str) -> Iterator[Finding]:
    from .vocabulary import check_vocabulary, load_vocabulary

    yield from check_vocabulary(load_vocabulary(folder, config.vocab_size if config else None), config, own)


def _memory(options: Options, choice: Choice, system: System, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Will a run fit?"""
    from k3mlx.needs import default_needs

    from . import fit
    from .packages import mlx_device_info

    refused = list(fit.check_experts_format(choice, checkpoint.affine_experts))
    if refused:
        yield from refused
        return
    _, expert_cache = _settings()
    plan, found = fit.check_memory(default_needs(choice, checkpoint), options.memory, expert_cache)
    yield found
    if plan is not None and choice.device == "metal":
        limit = (mlx_device_info() or {}).get("max_recommended_working_set_size")
        yield from fit.check_wired(plan, limit, system.memory.total if system.memory else None)


def _rate(checkpoint: Checkpoint) -> Finding:
    """What the disk of a model gives."""
    from k3mlx.experts.layout import ExpertLayout

    from .rate import check_rate, measure

    threads, _ = _settings()
    per_token = checkpoint.config.num_experts_per_token
    return check_rate(measure(ExpertLayout(checkpoint), checkpoint.stamps, threads, per_token))


def _settings() -> tuple[int, int | None]:
    """Reads at once and bytes of the expert cache, as a run would have them; bad variables have had their line."""
    from k3mlx.errors import UsageError
    from k3mlx.experts.options import IO_THREADS, expert_cache_from_environment, stream_options

    try:
        return stream_options().io_threads, expert_cache_from_environment()
    except UsageError:
        return IO_THREADS, None
