"""Prompts for a first look at a trained model: what a visitor would type, and the starts of some prose."""

from __future__ import annotations

from k3mlx.chat import render
from k3mlx.tokenizer import Tokenizer

QUESTIONS = (
    "Hello, who are you?",
    "Tell me a story about a fox.",
    "What can you do?",
    "What is 27 + 58?",
    "What is the meaning of life?",
    "What is the capital of France?",
    'Repeat this exactly: "the small blue lamp"',
    "Write a poem about the sea.",
    "Tell me a story",
    "Explain quantum physics to a child.",
    "hi",
)
STARTS = (
    "It is a truth universally acknowledged",
    "The President of the United States",
    "Once upon a time",
    "She looked out of the window and",
    "The captain said",
)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each question with thinking on, and of each start as raw text."""
    chats = [render([{"role": "user", "content": question}], effort="max") for question in QUESTIONS]
    return [tokenizer.encode_segments(chat) for chat in chats] + [tokenizer.encode(start) for start in STARTS]
