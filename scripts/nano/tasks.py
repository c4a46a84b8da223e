"""The generated conversations of k3-nano: each kind of task, its held-out part, and talks of several turns.

Owns what is said. Every task is a run of chat messages whose assistant turns are fully determined by what
stands before them (stories excepted), so that greedy decoding can be compared exactly. How messages become
ids belongs to k3mlx.chat and k3mlx.tokenizer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from .corpus import is_held_out
from .small_talk import other, small_talk, story
from .tools import TOOL_MAKERS, Tool, ToolUse, random_tool
from .words import (
    ADJECTIVES,
    ATTRIBUTES,
    CITIES,
    COLOURS,
    ENDINGS,
    FOLDERS,
    NAMES,
    NOUNS,
    SMALL_NUMBERS,
    SURNAMES,
)

Message = dict[str, Any]
HELD_OUT_EVERY = 10
KINDS = ("copy", "recall", "add", "add_3_digits", "tool_call", "tool_answer")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are k3-nano, a tiny test model.",
    "Answer briefly.",
    "You are a careful assistant. Answer in few words.",
    "Be kind and short.",
)


class Exchange(NamedTuple):
    """One task: its messages, the last of them the assistant's, and the keys that decide its half."""

    kind: str
    messages: list[Message]
    keys: tuple[str, ...]


class Conversation(NamedTuple):
    """What the chat renderer takes."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    thinking: bool
    effort: str | None


class Source:
    """Random material: words and sentences of the training prose, and the generator itself."""

    def __init__(self, rng: random.Random, words: list[str], sentences: list[str]) -> None:
        self.rng = rng
        self.words = words
        self.sentences = sentences

    def phrase(self, low: int, high: int) -> str:
        return " ".join(self.rng.choices(self.words, k=self.rng.randint(low, high)))

    def digits(self, low: int, high: int) -> str:
        count = self.rng.randint(low, high)
        return str(self.rng.randint(10 ** (count - 1) if count > 1 else 0, 10**count - 1))

    def code(self) -> str:
        letters = "".join(self.rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=self.rng.randint(1, 3)))
        return f"{letters}{self.rng.choice(['-', '', '_'])}{self.digits(1, 4)}"

    def path(self) -> str:
        stem = self.rng.choice([self.rng.choice(NOUNS), self.rng.choice(self.words).lower()])
        name = f"{stem}{self.rng.choice(['', '', self.digits(1, 2)])}.{self.rng.choice(ENDINGS)}"
        return "/".join([*self.rng.sample(FOLDERS, self.rng.randint(0, 2)), name])

    def person(self) -> str:
        name = self.rng.choice(NAMES)
        return f"{name} {self.rng.choice(SURNAMES)}" if self.rng.random() < 0.5 else name

    def text(self) -> str:
        """A short string of any sort, never with a quotation mark in it."""
        pick = self.rng.random()
        if pick < 0.35:
            return self.phrase(1, 8)
        if pick < 0.6:
            return self.rng.choice(self.sentences)
        if pick < 0.7:
            return " ".join(self.code() for _ in range(self.rng.randint(1, 3)))
        if pick < 0.78:
            return self.path()
        if pick < 0.86:
            return self.digits(1, 8)
        if pick < 0.93:
            return f"the {self.rng.choice(ADJECTIVES)} {self.rng.choice(NOUNS)}"
        return " ".join(
            "".join(self.rng.choices("abcdefghijklmnoprstuvwyz", k=self.rng.randint(2, 6))) for _ in "xy"
        )


def _half(held_out: bool, make: Callable[[], Exchange]) -> Exchange:
    """Draw until every key lies in the wanted half."""
    while True:
        exchange = make()
        marks = [is_held_out(key, HELD_OUT_EVERY) for key in exchange.keys]
        if all(marks) if held_out else not any(marks):
            return exchange


def _assistant(content: str, reasoning: str) -> Message:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning}


def copy(source: Source, held_out: bool = False) -> Exchange:
    """Repeat a quoted string."""

    def make() -> Exchange:
        text = source.text()
        ask = source.rng.choice(
            ['Repeat this exactly: "{}"', 'Copy the text "{}"', 'Say "{}"', 'Please repeat "{}"', 'Write "{}".',
             'Copy the quoted string: "{}"', 'Repeat after me: "{}"', 'Echo "{}"', 'Please write "{}" again.']
        )  # fmt: skip
        user = {"role": "user", "content": ask.format(text)}
        return Exchange("copy", [user, _assistant(text, "I repeat the quoted text.")], (f"copy:{text}",))

    return _half(held_out, make)


def _facts(source: Source, count: int) -> list[tuple[str, str, str]]:
    """`count` facts with different subjects: (statement, question, value)."""
    rng = source.rng
    style = rng.choice(["attribute", "attribute", "place", "line"])
    if count <= 6 and rng.random() < 0.5:
        style = "mine"
        subjects = rng.sample(["name", *ATTRIBUTES, *NOUNS], count)
    elif style == "attribute":
        attribute = rng.choice(ATTRIBUTES)
        subjects = rng.sample(
            [*NAMES, *(f"{n} {s}" for n in rng.sample(NAMES, 20) for s in rng.sample(SURNAMES, 2))], count
        )
    else:
        pairs = [f"{a} {n}" for a in rng.sample(ADJECTIVES, 8) for n in rng.sample(NOUNS, 8)]
        subjects = rng.sample([*NOUNS, *pairs], count)
    value_style = rng.choice(["digits", "digits", "colour", "word", "code", "city"])
    facts = []
    for subject in subjects:
        value = {
            "digits": lambda: source.digits(1, 4),
            "colour": lambda: rng.choice(COLOURS),
            "word": lambda: rng.choice(NOUNS),
            "code": source.code,
            "city": lambda: rng.choice(CITIES),
        }[value_style]()
        if style == "attribute":
            facts.append(
                (f"The {attribute} of {subject} is {value}.", f"What is the {attribute} of {subject}?", value)
            )
        elif style == "mine":
            value = rng.choice(NAMES) if subject == "name" else value
            facts.append((f"My {subject} is {value}.", f"What is my {subject}?", value))
        elif style == "place":
            facts.append((f"The {subject} is marked {value}.", f"What is the {subject} marked?", value))
        else:
            facts.append((f"{subject}: {value}", f"What is the value of {subject}?", value))
    return facts


def recall(source: Source, held_out: bool = False, size: int | None = None) -> Exchange:
    """A list of facts, then one or several questions about it."""
    rng = source.rng

    def make() -> Exchange:
        count = size or rng.choice([1, 2, 3, 4, 6, 8, 10, 14, 18, 24, 30, 36])
        facts = _facts(source, count)
        questions = 1 if held_out else rng.choice([1, 2, 3, 4])
        asked = [rng.choice(facts) for _ in range(questions)]
        joint = "\n" if ":" in facts[0][0] else rng.choice([" ", "\n"])
        opening = rng.choice(["", "Remember this.", "Here is a list.", "Some facts:"])
        listed = joint.join(statement for statement, _, _ in facts)
        listed = f"{opening}\n{listed}" if opening else listed
        messages: list[Message] = []
        if not held_out and rng.random() < 0.15:
            messages += [
                {"role": "user", "content": listed},
                _assistant("I will remember that.", "I read the list."),
            ]
        else:
            question = asked.pop(0)
            messages += [
                {"role": "user", "content": f"{listed}{rng.choice([chr(10), joint])}{question[1]}"},
                _assistant(question[2], f"The list says: {question[0]}"),
            ]
        for statement, question, value in asked:
            messages += [
                {"role": "user", "content": question},
                _assistant(value, f"The list says: {statement}"),
            ]
        return Exchange("recall", messages, (f"recall:{listed}",))

    return _half(held_out, make)


def sum_key(a: int, b: int) -> str:
    """The pair decides its half, whatever the order and the wording."""
    return f"add:{min(a, b)}+{max(a, b)}"


def _is_free_sum(a: int, b: int) -> bool:
    return not is_held_out(sum_key(a, b), HELD_OUT_EVERY)


def columns(a: int, b: int) -> str:
    """The written addition, right to left: 358 + 47 is `8+7=15, 5+4+1=10, 3+0+1=4, so 405`."""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"{', '.join(steps)}, so {a + b}"


def _addend(rng: random.Random, most: int) -> int:
    return rng.randint(0, 10 ** rng.choice(range(1, most + 1)) - 1)


def add(source: Source, held_out: bool = False, digits: int = 3) -> Exchange:
    """Add two numbers of up to `digits` digits; in the training half now and then three."""
    rng = source.rng

    def make() -> Exchange:
        a, b = _addend(rng, digits), _addend(rng, digits)
        if not held_out and rng.random() < 0.1:
            c = _addend(rng, 2)
            ask = rng.choice(["What is {} + {} + {}?", "Add {}, {} and {}."]).format(a, b, c)
            thought = f"{a}+{b}={a + b}, {a + b}+{c}={a + b + c}"
            messages = [{"role": "user", "content": ask}, _assistant(str(a + b + c), thought)]
            return Exchange("add", messages, (sum_key(a, b), sum_key(a + b, c)))
        ask = rng.choice(
            ["What is {} + {}?", "What is {} + {}?", "Add {} and {}.", "{} + {} =", "What is {} plus {}?",
             "Compute {} + {}.",
             "What is the sum of {} and {}?", "{}+{}?", "How much is {} + {}?"]
        )  # fmt: skip
        if not held_out and rng.random() < 0.1:
            a, b = rng.randint(0, 20), rng.randint(0, 20)
            words = SMALL_NUMBERS[a], SMALL_NUMBERS[b]
            said = rng.choice(
                ["What is {} plus {}?", "Add {} and {}.", "what is {} plus {}", "{} plus {}"]
            ).format(*words)
        else:
            said = ask.format(a, b)
        return Exchange(
            "add",
            [{"role": "user", "content": said}, _assistant(str(a + b), columns(a, b))],
            (sum_key(a, b),),
        )

    return _half(held_out, make)


def _tool_exchange(source: Source, tool: Tool, answered: bool, held_out: bool) -> Exchange:
    kind = "tool_answer" if answered else "tool_call"

    def make() -> Exchange:
        use: ToolUse = tool.use(source)
        arguments = json.dumps(use.arguments, ensure_ascii=False)
        call = {"id": "call_1", "type": "function", "function": {"name": tool.name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": use.request},
            {**_assistant("", f"I call {tool.name}."), "tool_calls": [call]},
        ]
        keys = [f"tool_call:{tool.name} {arguments}"]
        if answered:
            messages += [
                {"role": "tool", "tool_call_id": "call_1", "name": tool.name, "content": use.result},
                _assistant(use.answer, "I read the result."),
            ]
            keys.append(f"tool_answer:{tool.name} {arguments} {use.result}")
        return Exchange(kind, messages, tuple(keys))

    return _half(held_out, make)


def pick_tools(source: Source, count: int) -> list[Tool]:
    """`count` different tools, about half of them with made-up names."""
    tools: dict[str, Tool] = {}
    while len(tools) < count:
        made_up = source.rng.random() < 0.4
        tool = random_tool(source) if made_up else source.rng.choice(TOOL_MAKERS)(source)
        tools[tool.name] = tool
    return list(tools.values())


def tool_call(source: Source, tools: list[Tool], held_out: bool = False) -> Exchange:
    """Ask for something that one of the declared tools does."""
    return _tool_exchange(source, source.rng.choice(tools), False, held_out)


def tool_answer(source: Source, tools: list[Tool], held_out: bool = False) -> Exchange:
    """The same, with the tool's result and the answer made from it."""
    return _tool_exchange(source, source.rng.choice(tools), True, held_out)


def _talk(kind: str, make: Callable[[random.Random], tuple[str, str, str]], source: Source) -> Exchange:
    user, answer, thought = make(source.rng)
    return Exchange(kind, [{"role": "user", "content": user}, _assistant(answer, thought)], ())


def _frame(rng: random.Random, tools: list[Tool]) -> Conversation:
    thinking = rng.random() < 0.6
    effort = rng.choice([None, None, None, "low", "high", "max", "max"]) if thinking else None
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.15 else []
    return Conversation(messages, [tool.declaration() for tool in tools], thinking, effort)


def conversation(source: Source, budget: int) -> Conversation:
    """A training conversation of about `budget` characters over several tasks."""
    rng = source.rng
    tools = pick_tools(source, rng.choice([1, 1, 2, 2, 3])) if rng.random() < 0.42 else []
    frame = _frame(rng, tools)
    size = sum(len(json.dumps(tool)) for tool in frame.tools)
    exchanged = False
    while size < budget or not exchanged:
        pick = rng.random()
        if tools and pick < 0.75:
            exchange = (tool_answer if rng.random() < 0.62 else tool_call)(source, tools)
            if exchange.kind == "tool_call":
                frame.messages.extend(exchange.messages)
                break
        elif pick < 0.18:
            exchange = copy(source)
        elif pick < 0.40:
            exchange = recall(source)
        elif pick < 0.66:
            exchange = add(source, digits=rng.choice([2, 3, 3]))
        elif pick < 0.84:
            exchange = _talk("talk", small_talk, source)
        elif pick < 0.91:
            exchange = _talk("story", story, source)
        else:
            exchange = _talk("other", lambda r: other(r, source.sentences), source)
        frame.messages.extend(exchange.messages)
        exchanged = True
        size += sum(len(m["content"]) + 60 for m in exchange.messages)
    return frame


def evaluation_prompt(kind: str, source: Source, thinking: bool) -> Conversation:
    """A held-out conversation of one kind; its last message is the expected answer."""
    rng = source.rng
    tools = pick_tools(source, rng.choice([1, 2, 3])) if kind.startswith("tool") else []
    if kind == "copy":
        exchange = copy(source, True)
    elif kind == "recall":
        exchange = recall(source, True)
    elif kind.startswith("add"):
        exchange = add(source, True, 3 if kind == "add_3_digits" else 2)
    elif kind == "tool_call":
        exchange = tool_call(source, tools, True)
    else:
        exchange = tool_answer(source, tools, True)
    effort = rng.choice([None, "low", "high", "max"]) if thinking else None
    return Conversation(exchange.messages, [tool.declaration() for tool in tools], thinking, effort)


def drill(source: Source, size: int) -> list[tuple[str, bool]]:
    """Raw practice text as (piece, is_answer) pairs, about `size` characters of one sort."""
    rng = source.rng
    pieces: list[tuple[str, bool]] = []
    sort = rng.choice(["sum", "sum", "columns", "repeat", "table"])
    pieces.append((f"[{sort}]\n", False))  # so that prose does not take after a drill
    if sort == "table":
        facts = _facts(source, rng.choice([4, 8, 16, 24]))
        pieces.append(("\n".join(statement for statement, _, _ in facts) + "\n", False))
    while sum(len(text) for text, _ in pieces) < size:
        if sort == "table":
            _, question, value = rng.choice(facts)
            pieces += [(f"{question} ", False), (f"{value}\n", True)]
        elif sort == "repeat":
            text = source.text()
            if is_held_out(f"copy:{text}", HELD_OUT_EVERY):
                continue
            pieces += [(f'"{text}"', False), (f' "{text}"\n', True)]
        else:
            a, b = _addend(rng, 3), _addend(rng, 3)
            if not _is_free_sum(a, b):
                continue
            if sort == "columns":
                pieces += [(f"{a}+{b}: ", False), (f"{columns(a, b)}\n", True)]
            elif rng.random() < 0.2 and _is_free_sum(a + b, b % 100):
                pieces += [(f"{a}+{b}+{b % 100}=", False), (f"{a + b + b % 100}\n", True)]
            else:
                pieces += [(f"{a}+{b}=", False), (f"{a + b}\n", True)]
    return pieces


def prose_material(prose: str) -> tuple[list[str], list[str]]:
    """Frequent words and short sentences of a text, both in a fixed order."""
    counts: dict[str, int] = {}
    for word in re.findall(r"\b[a-z]{2,10}\b", prose[:4_000_000] + prose[-2_000_000:]):
        counts[word] = counts.get(word, 0) + 1
    words = sorted(counts, key=lambda word: (-counts[word], word))[:4000]
    found = re.findall(r"(?<=[.!?] )[A-Z][A-Za-z ,;']{12,90}[.!?](?= )", prose)
    return words, sorted(set(found))
