"""Two sessions in turn for 5,000 decode steps: `python -m tests.model.long_run FOLDER`.

Prints what the process holds after some of the steps as one JSON object, bytes by step: `anonymous` of the process
and `mlx` of MLX's arrays, both without what the latent caches (by their capacity) and the lists of ids have grown to.
"""

import ctypes
import json
import sys

import mlx.core as mx
import numpy as np

import k3mlx
from k3mlx.model.state import LatentCache

STEPS, MEASURED = 5000, (500, 2000, 5000)
ID_BYTES = 36  # of an id in a list


def anonymous_bytes():
    """Without mapped files, which the system drops as it likes, and freed memory that glibc keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))


def main(folder):
    measured = {}
    with k3mlx.load(folder, backend="mlx", device="cpu", dtype="bfloat16") as engine:
        sessions = engine.session(), engine.session()
        logits = [session.feed([1 + n]) for n, session in enumerate(sessions)]
        for step in range(1, STEPS + 1):
            for n, session in enumerate(sessions):
                logits[n] = session.feed([int(np.argmax(logits[n]))])
            if step in MEASURED:
                engine.backend._call(mx.clear_cache)  # freed buffers, as long as the longest context
                layers = [layer for session in sessions for layer in session._state.layers]
                latents = sum(layer.buffer.rows.nbytes for layer in layers if isinstance(layer, LatentCache))
                ids = sum(ID_BYTES * len(session) for session in sessions)
                measured[step] = {
                    "anonymous": anonymous_bytes() - latents - ids,
                    "mlx": mx.get_active_memory() - latents,
                }
    print(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
