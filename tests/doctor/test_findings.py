"""Every fatal line of the doctor is reached by a case here, and exit codes follow from them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from k3mlx import doctor
from k3mlx.config import ModelConfig, load_config
from k3mlx.devices import Choice
from k3mlx.doctor import files, fit, kernels, packages, rate, system, trial, vocabulary
from k3mlx.doctor.findings import EXIT_CODES, FATAL, Finding, exit_code, fatal, ok, warning
from k3mlx.errors import ModelFilesError, ResourceError, UsageError
from k3mlx.tokenizer import Tokenizer
from tests.checkpoint.damage import shard
from tests.needs import MB, NEEDS

from .facts import LINUX, NUMPY, TRIAL, selftest_report, write_model

FETCH = "k3mlx download"
COMMANDS = files.Commands(FETCH, f"{FETCH} --verify")


def raising(error: Exception) -> Callable[..., Choice]:
    def call(*arguments: object) -> Choice:
        raise error

    return call


def damaged(tmp_path: Path, name: str, text: str | None) -> Path:
    """A model in which a file has another text, or none."""
    folder = write_model(tmp_path / "model")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    return folder


def census(folder: Path) -> list[Finding]:
    error = files.open_model(folder, ())
    assert isinstance(error, ModelFilesError)
    return list(files.check_census(error, folder, (), COMMANDS))


class Lossy(Tokenizer):
    """A vocabulary that loses what it is given."""

    def decode(self, ids: Iterable[int]) -> str:
        return "?"


def model(tmp_path: Path) -> tuple[Path, ModelConfig]:
    folder = write_model(tmp_path / "model")
    return folder, load_config(folder)


def foreign_ids(tmp_path: Path) -> Iterable[Finding]:
    folder, config = model(tmp_path)
    return vocabulary.check_vocabulary(Tokenizer.load(folder), replace(config, eos_token_id=3), FETCH)


CASES: dict[str, Callable[[Path], Iterable[Finding]]] = {
    "python": lambda _: system.check_system(replace(LINUX, python=(3, 9, 1))),
    "package": lambda _: packages.check_packages([replace(NUMPY, version=None, fits=False)]),
    "setting": lambda _: packages.check_settings({}, [raising(UsageError("K3_PIPE is 'x'"))]),
    "device-setting": lambda _: packages.check_choice("auto", "auto", raising(UsageError("K3_METAL is 7")))[
        1:
    ],
    "device": lambda _: packages.check_choice("mlx", "gpu", raising(ResourceError("no GPU")))[1:],
    "selftest": lambda _: [kernels.check_selftest(selftest_report("numpy", ("kda_chunk", "numpy")))],
    "trial": lambda _: trial.check_trial(trial.Trial(1, "k3mlx: error: it broke")),
    "trial-refused": lambda _: trial.check_trial(trial.Trial(4, "k3mlx: error: K3_METAL=1 asks for Metal")),
    "trial-answer": lambda _: trial.check_trial(replace(TRIAL, text="green lagoon")),
    "model": lambda tmp_path: [files.check_model(ModelFilesError("x/y: not there; fetch it"))],
    "file": lambda _: files.check_files(
        [files.FileState(Path("a"), files.REFUSED, "a: cannot be read")], FETCH
    ),
    "config": lambda tmp_path: census(damaged(tmp_path, "config.json", '{"model_type": "other"}')),
    "census": lambda tmp_path: census(damaged(tmp_path, "model-00002-of-000003.safetensors", None)),
    "overlay": lambda _: files.check_census(
        ModelFilesError("o/dense.safetensors: 5 bytes, expected 9"),
        Path("o"),
        (),
        replace(COMMANDS, remake="convert"),
    ),
    "vocabulary": lambda tmp_path: vocabulary.check_vocabulary(
        vocabulary.load_vocabulary(damaged(tmp_path, "tiktoken.model", None), 512), None, FETCH
    ),
    "vocabulary-ids": foreign_ids,
    "vocabulary-text": lambda tmp_path: vocabulary.check_vocabulary(
        Lossy.load(model(tmp_path)[0]), model(tmp_path)[1], FETCH
    ),
    "read": lambda _: [rate.check_rate(rate.DiskRate(error="a: reading failed (Input/output error)"))],
    "experts-format": lambda _: fit.check_experts_format(Choice("numpy", "cpu"), affine=True),
    "memory": lambda _: fit.check_memory(NEEDS, 600 * MB, None)[1:],
}


def fatal_lines() -> list[str]:
    """The code of each place in the package that makes a fatal finding."""
    found = []
    for path in Path(doctor.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fatal":
                assert isinstance(node.args[0], ast.Constant), (path, node.lineno)
                found.append(node.args[0].value)
    return found


def test_every_fatal_line_has_a_code_of_its_own_and_a_case() -> None:
    assert sorted(fatal_lines()) == sorted(EXIT_CODES)
    assert set(CASES) == set(EXIT_CODES)


@pytest.mark.parametrize("code", CASES)
def test_the_case_is_fatal_and_has_a_remedy(code: str, tmp_path: Path) -> None:
    (found,) = [finding for finding in CASES[code](tmp_path) if finding.level == FATAL]
    assert found.code == code
    assert found.text
    assert found.remedy
    assert exit_code([found]) == EXIT_CODES[code]


def test_exit_codes_of_several() -> None:
    assert exit_code([]) == 0
    assert exit_code([ok("a", "well"), warning("b", "less well", "do this")]) == 0
    failed, files_, no_fit = (fatal(code, "x", "y") for code in ("trial", "census", "memory"))
    assert exit_code([failed, no_fit]) == 4
    assert exit_code([failed, no_fit, files_]) == 3


def test_missing_damaged_and_absent_have_their_commands(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    third = shard(folder, 3)
    third.write_bytes(third.read_bytes()[:-1])
    shard(folder, 1).rename(folder / "model-00009-of-000003.safetensors")
    lines = census(folder)
    assert [line.remedy for line in lines] == [FETCH, f"rename that file, or fetch it: {FETCH}"]
    text = "\n".join(line.text for line in lines)
    assert "model-00001-of-000003.safetensors: shard missing" in text
    assert "its tensors are in 'model-00009-of-000003.safetensors': rename that file" in text
    assert "model-00003-of-000003.safetensors: truncated, 1 bytes are missing" in text
    data = third.read_bytes()
    third.write_bytes(b"\xff" * 8 + data[8:])
    assert [line.remedy for line in census(folder) if third.name in line.text] == [f"{FETCH} --verify"]
