"""The held-out conversations of k3-nano, answered greedily by any engine."""

import json
from pathlib import Path

import numpy as np

from k3mlx.chat import render

PROMPTS = json.loads((Path(__file__).parents[1] / "nano_prompts.json").read_text("utf-8"))


def greedy_answers(engine, prompts=PROMPTS, limit=60):
    """[(label, ids up to the stop id)] of every conversation, its last message left to the model."""
    answers = []
    for prompt in prompts:
        segments = render(
            prompt["messages"][:-1], tools=prompt["tools"] or None, thinking=prompt["thinking"],
            effort=prompt["effort"], add_generation_prompt=True,
        )  # fmt: skip
        session, said = engine.session(), []
        logits = session.feed(engine.tokenizer.encode_segments(segments))
        while (best := int(np.argmax(logits))) not in engine.tokenizer.stop_ids and len(said) < limit:
            said.append(best)
            logits = session.feed([best])
        answers.append((prompt["label"], said))
    return answers
