"""What the agents of this folder do, without bidikv and with it: answer questions about cities with one tool."""

import os
from typing import Literal

URL = os.environ.get("BIDIKV_BASE_URL", "http://127.0.0.1:8200/v1")
MODEL = os.environ.get("BIDIKV_MODEL", "smollm2")

INSTRUCTIONS = (
    "You plan trips. Look at a city before you say anything about it, and say only what you have seen there. "
    "Answer in one or two short sentences, in plain words, and name the city that you are talking about."
)
QUESTIONS = (
    "Where should I go tomorrow, if I want to sit outside all day and would rather not carry an umbrella?",
    "And if it had to be the other one of the two, what would I have to put into my bag?",
    "Which of them would you choose for the whole of next week?",
)


def look(city: Literal["Oslo", "Paris"]) -> str:
    """Look at a city.

    Args:
        city: Which one.
    """
    return {"Oslo": "Rain until noon, 9 degrees, wind from the west.", "Paris": "Sunny, 21 degrees, no wind."}[city]
