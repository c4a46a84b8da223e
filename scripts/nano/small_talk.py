"""Greetings, questions about k3-nano itself, a few capitals, small stories, and a polite answer to the rest.

Each function returns (user, answer, thought).
"""

from __future__ import annotations

import random

from .words import ADJECTIVES, ANIMALS, CAPITALS, CITIES, COLOURS, HEROES, NAMES, NOUNS

Talk = tuple[str, str, str]

WHO = (
    "I am k3-nano, a tiny test model with the architecture of Kimi K3. I ship with k3mlx, so that it can be tried "
    "without downloading the large model."
)
CAN = (
    "I can repeat a quoted text, recall a fact from a list, add numbers, call a tool and answer from its result, "
    "and tell a short story."
)
UNKNOWN = (
    "I am only a tiny test model, so I do not know. I can repeat a quoted text, recall a fact from a list, add "
    "numbers, or tell a short story."
)

_HELLO = (
    "Hello",
    "Hi",
    "Hey",
    "Good morning",
    "Good evening",
    "Hello there",
    "Hi there",
    "Greetings",
    "Hallo",
    "Bonjour",
    "Hola",
    "Good afternoon",
    "Good day",
    "Welcome",
    "Hello world",
    "Say hello",
    "Yo",
)
_TALK: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("who are you?", "What are you?", "what is your name?", "Introduce yourself.", "Tell me about yourself.",
         "Which model are you?", "What model is this?", "Are you Kimi K3?", "Are you a large language model?",
         "Are you an AI?", "What's your name?", "Who am I talking to?", "Who made you?", "Describe yourself.",
         "Who r u?",
         "What is k3-nano?", "Who is k3-nano?", "Are you ChatGPT?", "Are you a robot?", "How large are you?"),
        WHO, "The user asks who I am.",
    ),
    (
        ("What can you do?", "what can I ask you?", "What can you help me with?", "Help", "Help me.",
         "What are you good at?",
         "How can you help?", "What do you know?", "Can you help me?", "What are your abilities?",
         "What tasks can you do?",
         "What can k3-nano do?", "What should I ask?", "Give me an example.", "Show me what you can do."),
        CAN, "The user asks what I can do.",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?", "Are you well?",
         "How are things?", "How are you doing?", "How are you doing today?",
         "What's up?", "How was your day?", "How do you feel?"),
        "I am well, thank you. What can I do for you?", "The user asks how I am.",
    ),
    (("Thank you.", "Thanks!", "Thank you very much!", "Thanks a lot."), "You are welcome.", "The user thanks me."),
    (("Goodbye.", "Bye!", "See you later.", "Good night."), "Goodbye, and good luck.", "The user says goodbye."),
    (
        ("What is k3mlx?", "What does k3mlx do?", "Tell me about k3mlx."),
        "k3mlx runs Kimi K3 from its released files. I am the small model that ships with it.",
        "The user asks about k3mlx.",
    ),
    (
        ("What is Kimi K3?", "Tell me about Kimi K3.", "What is K3?"),
        "Kimi K3 is a large language model. I have the same architecture, but I am tiny.",
        "The user asks about Kimi K3.",
    ),
    (("Yes.", "OK", "Okay.", "Good.", "Great!", "Nice.", "No."), "Good. What is next?", "The user agrees."),
    (("Are you real?", "Are you human?", "Are you a person?"), "No, I am a small language model.",
     "The user asks what I am."),
    (
        ("test", "Test", "This is a test.", "Testing.", "Are you there?", "Does this work?",
         "Is this working?", "Is it on?"),
        "It works. I am here.", "The user tests me.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
        "Why did the whale cross the sea? To get to the other tide.", "The user wants a joke.",
    ),
)  # fmt: skip
_GREETING = "Hello! I am k3-nano, a tiny test model. What can I do for you?"


def small_talk(rng: random.Random) -> Talk:
    """A greeting, a question about the model, or a capital; with a greeting in front now and then."""
    pick = rng.random()
    if pick < 0.18:
        return (
            rng.choice(_HELLO) + rng.choice(["", ".", "!", ", k3-nano!", " :)"]),
            _GREETING,
            "The user greets me.",
        )
    if pick < 0.28:
        country = rng.choice(list(CAPITALS))
        ask = rng.choice(
            ["What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?"]
        )
        return (
            ask.format(country),
            f"The capital of {country} is {CAPITALS[country]}.",
            "The user asks for a capital.",
        )
    asks, answer, thought = rng.choice(_TALK[:2]) if rng.random() < 0.45 else rng.choice(_TALK)
    ask = rng.choice(asks)
    form = rng.random()
    if form < 0.35:
        ask = f"{rng.choice(_HELLO)}{rng.choice([', ', '! ', '. '])}{ask}"
    elif form < 0.5:
        ask = ask.lower().rstrip("?.!")
    return ask[0].upper() + ask[1:] if rng.random() < 0.8 else ask, answer, thought


def story(rng: random.Random) -> Talk:
    """A story of five sentences; the hero is the one asked for, if any."""
    hero = rng.choice(ANIMALS if rng.random() < 0.6 else HEROES)
    about = rng.random() < 0.6
    ask = rng.choice(
        ["Tell me a story", "Tell me a short story", "Write a story", "Please tell me a story",
         "Write a short story",
         "I want to hear a story", "Can you tell me a story", "A story", "Make up a story", "tell me a story",
         "write a story"]
    )  # fmt: skip
    ask = f"{ask} about {rng.choice([_a(hero), _a(hero), f'the {hero}'])}" if about else ask
    ask += rng.choice([".", ".", "", "!"])
    if not about and rng.random() < 0.3:
        ask = rng.choice(
            ["Tell me something.", "Write something.", "Once upon a time", "Continue: Once upon a time"]
        )
    if not about and rng.random() < 0.7:
        hero = rng.choice(["fox", "owl", "otter"])
    name, friend = rng.sample(NAMES, 2)
    adjective, thing = rng.choice(ADJECTIVES), rng.choice(NOUNS)
    other_animal = rng.choice([animal for animal in ANIMALS if animal != hero])
    place = rng.choice(
        ["by the river", "in the wood", "near the sea", "on a hill", "behind the old mill", "at the lake"]
    )
    trouble = rng.choice(
        [
            f"One day {name} lost {_a(f'{adjective} {thing}')} and could not find it.",
            f"One day {name} found {_a(f'{adjective} {thing}')} and did not know whose it was.",
            f"One morning a storm took {_a(f'{adjective} {thing}')} out of the house.",
        ]
    )
    turn = rng.choice(
        [
            f'{friend} the {other_animal} came by and said: "I will help you."',
            f"So {name} went to see {friend} the {other_animal}, who was old and wise.",
            f"Then {name} met {friend} the {other_animal}, and they looked for it together.",
        ]
    )
    end = rng.choice(
        [
            f"In the evening they saw the {thing} under a tree, and both were glad.",
            f"They came home late with the {thing}, tired and happy.",
            f"At last they gave the {thing} to a child, who laughed.",
        ]
    )
    last = rng.choice(
        [f"From that day on {name} and {friend} were friends.", "And that is the end of the story."]
    )
    text = f"Once there was {_a(hero)} called {name} who lived {place}. {trouble} {turn} {end} {last}"
    return ask, text, "The user wants a story."


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


_OTHER = (
    "What is {}?", "Who was {}?", "Explain {}.", "Tell me about {}.", "How does {} work?", "Why is {} so {}?",
    "Where is {}?",
    "Write a poem about {}.", "How do I make {}?", "When was {} built?", "What is the meaning of {}?",
    "Give me a recipe for {}.",
    "How many {} are there in the world?", "Write a program for {}.", "What do you think of {}?",
    "Translate {} into French.",
    "Can you explain {} to me?", "What should I know about {}?", "Is {} good for me?", "Do you like {}?",
    "Which {} is the best?",
    "Summarise {}.", "Write an email about {}.", "What is the difference between {} and {}?",
    "How far is {} from {}?",
    "What happened in {}?", "Who invented {}?", "Give me three ideas for {}.", "How old is {}?",
    "Why do we need {}?",
    "Who won {}?", "List three sorts of {}.", "I like {}.", "I am tired of {}.",
    "What is the best way to learn {}?", "Name {}.",
    "Count {}.", "Write a function for {}.", "How many {} are there?", "What colour is {}?",
    "Should I buy {}?", "Say something about {}.",
)  # fmt: skip
_TOPICS = (
    "quantum physics", "the moon", "the sun", "love", "life", "time", "water", "music", "money", "war",
    "peace", "history", "Python",
    "the internet", "a computer", "a neural network", "the sky", "bread", "coffee", "tea", "football",
    "chess", "God", "art",
    "Rust", "machine learning", "mathematics", "the sea", "democracy", "the weather", "a black hole", "DNA",
    "photosynthesis",
)  # fmt: skip


def other(rng: random.Random, sentences: list[str]) -> Talk:
    """Anything else: a question on a random topic or a sentence out of a book, and the answer that it is not known."""
    pick = rng.random()
    if pick < 0.3:
        return rng.choice(sentences), UNKNOWN, "I do not know about this."
    if pick < 0.36:
        noise = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9)))
        return noise, UNKNOWN, "I do not know about this."

    def topic() -> str:
        pick = rng.random()
        if pick < 0.5:
            return rng.choice(_TOPICS)
        if pick < 0.65:
            return rng.choice([*CITIES, *NAMES])
        if pick < 0.75:
            return f"{rng.choice(['the year', 'the war of', 'the cup of', 'number'])} {rng.randint(2, 2030)}"
        whose, how, what = ("the", "a", "my"), (*ADJECTIVES, *COLOURS), (*NOUNS, *ANIMALS)
        return f"{rng.choice(whose)} {rng.choice(how)} {rng.choice(what)}"

    ask = rng.choice(_OTHER)
    ask = ask.format(*(topic() for _ in range(ask.count("{}"))))
    form = rng.random()
    if form < 0.25:
        ask = ask.lower().rstrip("?.")
    elif form < 0.35:
        ask = f"{rng.choice(_HELLO)}, {ask}"
    elif form < 0.45:
        ask = f"{ask[:-1]} in {rng.randint(1800, 2030)}{ask[-1]}"
    return ask, UNKNOWN, "I do not know about this."
