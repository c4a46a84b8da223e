"""Memory gets short while it runs, for real: the limit of a control group is lowered under a process.

The signal alone, injected, is tested in test_governor.py. Needs Linux and the right to make a control group below
this process's own; skipped elsewhere, saying what is missing.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow

SHARE = 0.97  # of the new limit in use: less than 4 % are left, which is short
SIZES = ["--layers", "4", "--experts", "64", "--vocab", "1024", "--width", "4"]
RUN = """
import hashlib, json, sys, time
import k3mlx
with k3mlx.load(sys.argv[1], backend=sys.argv[2], device="cpu", memory="3GB", prefill_step_size=64,
                warm_start="off") as engine:
    session, digest = engine.session(), hashlib.sha256()
    session.feed(list(range(64)))
    before, deadline = engine.backend.store.budget, time.monotonic() + 60
    print("ready", flush=True)
    squeezed = sys.stdin.readline().strip() == "squeezed"
    for n in range(40):
        digest.update(session.feed([n]).tobytes())
        while squeezed and n == 20 and not engine.governor.shrinks and time.monotonic() < deadline:
            time.sleep(0.1)
            engine.governor.check()
    print(json.dumps({"digest": digest.hexdigest(), "shrinks": engine.governor.shrinks, "before": before,
                      "after": engine.backend.store.budget}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slice")
    script = ROOT / "scripts" / "make_slice.py"
    subprocess.run([sys.executable, str(script), str(folder), *SIZES], check=True, timeout=300)
    return folder


@contextmanager
def control_group():
    """A memory group of version 1 or 2 below ours; skips the test where there is none to be had."""
    for line in Path("/proc/self/cgroup").read_text().splitlines() if sys.platform == "linux" else ():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or number == "0":
            root = "/sys/fs/cgroup/memory" if number != "0" else "/sys/fs/cgroup"
            group = Path(root + path) / f"k3mlx-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                if (group / "memory.limit_in_bytes").exists() or (group / "memory.max").exists():
                    yield group
                    return
            finally:
                group.rmdir()
    pytest.skip("no memory control group can be made below this process's own")


def lower(group):
    """Set the limit a little above what is in use, page cache left out."""
    old = (group / "memory.limit_in_bytes").exists()
    usage, key, limit = (
        ("memory.usage_in_bytes", "total_inactive_file", "memory.limit_in_bytes")
        if old
        else ("memory.current", "inactive_file", "memory.max")
    )
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / usage).read_text()) - int(stat[key])
    (group / limit).write_text(str(int(used / SHARE)))


def run(folder, backend, group=None):
    import json

    command = [sys.executable, "-c", RUN, str(folder), backend]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    ) as process:
        if group is not None:
            (group / "cgroup.procs").write_text(str(process.pid))
        assert process.stdout.readline() == "ready\n"
        if group is not None:
            lower(group)
        out, _ = process.communicate("squeezed\n" if group else "free\n", timeout=300)
    assert process.returncode == 0
    return json.loads(out)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_a_lowered_limit_shrinks_the_cache_and_changes_no_bit(folder, backend):
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="mlx is not installed")
    with control_group() as group:
        squeezed = run(folder, backend, group)
    free = run(folder, backend)
    print(f"{backend}: cache {squeezed['before'] / 1e6:.0f} -> {squeezed['after'] / 1e6:.0f} MB")
    assert free["shrinks"] == 0
    assert squeezed["shrinks"] > 0
    assert squeezed["after"] < squeezed["before"] == free["after"]
    assert squeezed["digest"] == free["digest"]
