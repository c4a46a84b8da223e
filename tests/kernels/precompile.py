"""Compiles every CUDA text that judge c runs, on a machine without a GPU.

python -m tests.kernels.precompile DIR [kernel ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from k3mlx.kernels.cases import Case

from . import cuda_text, sizes
from .texts import generated

SHORT = 3  # tokens: enough for the same texts as at full length


def _cases() -> Iterator[Case]:
    for cases in sizes.CASES.values():
        yield from cases()
    yield from sizes.gpu_cases(SHORT)
    for _, _, threads, case in sizes.bench_cases(SHORT):
        for count in threads:
            yield replace(case, threads=count)


def _compile(text: str, target: Path) -> None:
    target.write_bytes(cuda_text.compile_cuda(text)[0])


def main() -> None:
    folder, stems = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        cuda_text.cuda_text(generated(case, cuda=True))
        for case in _cases()
        if not stems or case.stem in stems
    }
    targets = {folder / cuda_text.code_name(text): text for text in texts}
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(_compile, text, path) for path, text in targets.items() if not path.exists()]
        for job in jobs:
            job.result()
    print(f"{len(jobs)} kernels compiled, {len(targets)} in {folder}")


if __name__ == "__main__":
    main()
