"""The tools of the generated conversations: declarations, requests, results and the answers made from them.

Strings that a call or an answer must carry over are quoted in the request and in the result, because a quoted
word and a word after a space are different tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .words import CITIES, COLOURS, CURRENCIES, FIELDS, NOUNS, SKIES, UNITS, VERBS

if TYPE_CHECKING:
    from .tasks import Source


class ToolUse(NamedTuple):
    """A request, the call it needs, a result and the answer."""

    request: str
    arguments: dict[str, Any]
    result: str
    answer: str


class Tool(NamedTuple):
    """A declared tool; `use` draws one use of it."""

    name: str
    description: str
    parameters: dict[str, str]
    use: Callable[[Source], ToolUse]

    def declaration(self) -> dict[str, Any]:
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


def _city(source: Source) -> str:
    return (
        source.rng.choice(CITIES)
        if source.rng.random() < 0.7
        else source.rng.choice(source.words).capitalize()
    )


def _thing(source: Source) -> str:
    return source.rng.choice(NOUNS) if source.rng.random() < 0.5 else source.phrase(1, 2)


def weather(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        city, sky, degrees = _city(source), source.rng.choice(SKIES), source.rng.randint(1, 39)
        ask = source.rng.choice(
            [
                'What is the weather in "{}"?',
                'How is the weather in "{}" today?',
                'Check the weather in "{}".',
            ]
        )
        result = json.dumps({"city": city, "sky": sky, "temperature": degrees}, ensure_ascii=False)
        return ToolUse(
            ask.format(city), {"city": city}, result, f'It is {sky} in "{city}", {degrees} degrees.'
        )

    return Tool("get_weather", "Weather of a city", {"city": "string"}, use)


def clock(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        city, time = _city(source), f"{source.rng.randint(0, 23)}:{source.rng.randint(0, 59):02d}"
        ask = source.rng.choice(['What time is it in "{}"?', 'Tell me the time in "{}".'])
        result = json.dumps({"city": city, "time": time}, ensure_ascii=False)
        return ToolUse(ask.format(city), {"city": city}, result, f'It is {time} in "{city}".')

    return Tool("get_time", "Local time of a city", {"city": "string"}, use)


def reader(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        path, text = source.path(), source.phrase(2, 8)
        ask = source.rng.choice(
            ['What does the file "{}" say?', 'Read the file "{}".', 'Open "{}" and read it to me.']
        )
        return ToolUse(ask.format(path), {"path": path}, f'"{text}"', f'The file says "{text}".')

    return Tool("read_file", "Text of a file", {"path": "string"}, use)


def finder(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        query, hits, first = source.phrase(1, 4), source.rng.randint(1, 99), source.phrase(1, 4)
        ask = source.rng.choice(['Search for "{}".', 'Find "{}" for me.', 'Look up "{}".'])
        result = json.dumps({"hits": hits, "first": first}, ensure_ascii=False)
        return ToolUse(
            ask.format(query), {"query": query}, result, f'I found {hits}, the first is "{first}".'
        )

    return Tool("search", "Search the web", {"query": "string"}, use)


def timer(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        minutes, number = source.rng.randint(1, 120), source.rng.randint(1, 999)
        ask = source.rng.choice(
            ["Set a timer for {} minutes.", "Wake me in {} minutes.", "Start a {} minute timer."]
        )
        result = json.dumps({"status": "ok", "id": number})
        return ToolUse(ask.format(minutes), {"minutes": minutes}, result, f"Timer {number} is set.")

    return Tool("set_timer", "Start a timer", {"minutes": "number"}, use)


def messenger(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        person, text, number = source.person(), source.phrase(1, 6), source.rng.randint(1, 999)
        ask = source.rng.choice(['Send "{1}" to "{0}".', 'Tell "{0}" this: "{1}"', 'Write to "{0}": "{1}"'])
        arguments = {"to": person, "text": text}
        result = json.dumps({"status": "sent", "id": number})
        return ToolUse(
            ask.format(person, text), arguments, result, f'Message {number} to "{person}" is sent.'
        )

    return Tool("send_message", "Send a message", {"to": "string", "text": "string"}, use)


def prices(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        item, price, money = _thing(source), source.rng.randint(1, 999), source.rng.choice(CURRENCIES)
        ask = source.rng.choice(
            ['What does the "{}" cost?', 'How much is the "{}"?', 'Price of "{}", please.']
        )
        result = json.dumps({"item": item, "price": price, "currency": money}, ensure_ascii=False)
        return ToolUse(ask.format(item), {"item": item}, result, f'The "{item}" costs {price} {money}.')

    return Tool("get_price", "Price of an item", {"item": "string"}, use)


def people(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        person, town, age = source.person(), _city(source), source.rng.randint(18, 90)
        result = json.dumps({"name": person, "town": town, "age": age}, ensure_ascii=False)
        if source.rng.random() < 0.5:
            return ToolUse(f'Where does "{person}" live?', {"name": person}, result, f'The town is "{town}".')
        return ToolUse(f'How old is "{person}"?', {"name": person}, result, f"The age is {age}.")

    return Tool("find_person", "Data of a person", {"name": "string"}, use)


def converter(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        amount, value = source.rng.randint(1, 999), source.rng.randint(1, 9999)
        unit, other = source.rng.sample(UNITS, 2)
        ask = source.rng.choice(['Convert {} "{}" to "{}".', 'How many "{2}" are {0} "{1}"?'])
        arguments = {"amount": amount, "from": unit, "to": other}
        result = json.dumps({"value": value, "unit": other})
        return ToolUse(ask.format(amount, unit, other), arguments, result, f"That is {value} {other}.")

    return Tool("convert", "Convert units", {"amount": "number", "from": "string", "to": "string"}, use)


def notes(source: Source) -> Tool:
    def use(source: Source) -> ToolUse:
        title, body = source.phrase(1, 3), source.phrase(2, 8)
        ask = source.rng.choice(['Make a note "{}" with the text "{}".', 'Save under "{}": "{}"'])
        path = source.path()
        return ToolUse(
            ask.format(title, body),
            {"title": title, "body": body},
            json.dumps({"saved": path}),
            f'Saved as "{path}".',
        )

    return Tool("create_note", "Save a note", {"title": "string", "body": "string"}, use)


TOOL_MAKERS = (weather, clock, reader, finder, timer, messenger, prices, people, converter, notes)


def random_tool(source: Source) -> Tool:
    """A tool with a made-up name, one or two parameters and a result with one to three fields."""
    rng = source.rng
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    keys = rng.sample(FIELDS, rng.choice([1, 1, 2]))
    parameters = {key: rng.choice(["string", "string", "number"]) for key in keys}

    def value(source: Source, kind: str) -> Any:
        if kind == "number":
            return source.rng.randint(0, 9999)
        pick = source.rng.random()
        if pick < 0.3:
            return source.rng.choice(COLOURS)
        return source.code() if pick < 0.5 else source.phrase(1, 3)

    def shown(value: Any) -> str:
        return str(value) if isinstance(value, int) else f'"{value}"'

    def use(source: Source) -> ToolUse:
        rng = source.rng
        arguments = {key: value(source, kind) for key, kind in parameters.items()}
        said = " and ".join(f'"{key}" {shown(item)}' for key, item in arguments.items())
        ask = rng.choice(['Call "{}" with {}.', 'Use "{}" with {}.', 'Run "{}" with {}, please.'])
        fields = rng.sample([field for field in FIELDS if field not in keys], rng.choice([1, 2, 3]))
        result = {field: value(source, rng.choice(["string", "number"])) for field in fields}
        asked = rng.choice(fields)
        request = f'{ask.format(name, said)} What is the "{asked}"?'
        text = json.dumps(result, ensure_ascii=False)
        return ToolUse(request, arguments, text, f'The "{asked}" is {shown(result[asked])}.')

    return Tool(name, f"{name.replace('_', ' ').capitalize()}", parameters, use)
