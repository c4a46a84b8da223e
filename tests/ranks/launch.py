"""Ranks of a test as processes of this machine, with the environment that `mlx.launch` gives a ring."""

import json
import os
import socket
import subprocess
import sys
import time

from tests.paths import ROOT

LIMIT = 400  # seconds for a whole run; four ranks of the golden model on two busy cores take minutes


class Ranks:
    """`size` processes of tests/ranks/run.py; `folders` may name another model for a rank, `dense` those ranks that
    split dense weights (True: all), `options` more of `k3mlx.load`."""

    def __init__(self, tmp_path, size, *arguments, folders=None, dense=False, **options):
        hosts = [[f"127.0.0.1:{port}"] for port in _free_ports(size)]
        hostfile = tmp_path / "hosts.json"
        hostfile.write_text(json.dumps(hosts))
        self.out = tmp_path / "out.json"
        self.processes = []
        for rank in range(size):
            folder = (folders or {}).get(rank, (folders or {}).get(None, "-"))
            options["dense_parallel"] = dense is True or (dense and rank in dense)
            environ = os.environ | {
                "MLX_RANK": str(rank),
                "MLX_HOSTFILE": str(hostfile),
                "OMP_NUM_THREADS": "1",
            }
            command = [
                sys.executable,
                "-m",
                "tests.ranks.run",
                str(self.out),
                str(folder),
                json.dumps(options),
                *map(str, arguments),
            ]
            self.processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self.processes:
            process.kill()
            process.communicate()

    def finish(self):
        """[(exit code, stderr)] of all ranks."""
        until = time.monotonic() + LIMIT
        done = []
        for process in self.processes:
            _, errors = process.communicate(timeout=max(1, until - time.monotonic()))
            done.append((process.returncode, errors))
        return done

    def result(self):
        """What rank 0 wrote, when all have ended well."""
        done = self.finish()
        assert [code for code, _ in done] == [0] * len(done), done
        return json.loads(self.out.read_text())

    def wait_for_step(self, step):
        """Until rank 0 has decoded so many tokens."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            try:
                if json.loads(self.out.read_text())["steps"] >= step:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.01)
        raise AssertionError("the ranks never came to that step")


def _free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
