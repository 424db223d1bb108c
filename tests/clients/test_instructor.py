"""instructor: answers as classes, asked for again where one is not valid."""

from typing import Any

import openai
import pytest
from pydantic import BaseModel, field_validator

from tests.clients.asked import QUESTION, READ, READING, Reading
from tests.player.system import PlayedSystem

# These clients leave their connections open, and say not how to close them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

CALLED = {"calls": [["Reading", READING.model_dump()]]}
MODES = {"JSON_SCHEMA": READ, "TOOLS": CALLED, "JSON": READ}


def patched(spillway: PlayedSystem, mode: str) -> Any:
    import instructor  # takes a second, of every process that collects this file

    client = openai.OpenAI(base_url=f"{spillway.url}/v1", api_key=spillway.api_key, max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_structured_answer(spillway: PlayedSystem, mode: str) -> None:
    messages = [{"role": "user", "content": f"{QUESTION} {spillway.play(MODES[mode])}"}]
    client = patched(spillway, mode)
    answer = client.create(model=spillway.model, messages=messages, response_model=Reading)  # of a class below ours
    assert answer.model_dump() == READING.model_dump()


def test_an_answer_that_grows(spillway: PlayedSystem) -> None:
    messages = [{"role": "user", "content": spillway.play(READ)}]
    client = patched(spillway, "JSON_SCHEMA")
    partials = list(client.create_partial(model=spillway.model, messages=messages, response_model=Reading))
    assert len(partials) > 1
    assert partials[-1].model_dump() == READING.model_dump()


class Shallow(BaseModel):
    """What the first answer is not, which no grammar can know."""

    level_cm: int

    @field_validator("level_cm")
    @classmethod
    def shallow(cls, level_cm: int) -> int:
        if level_cm > 100:
            raise ValueError("that is deep")
        return level_cm


def test_an_invalid_answer_is_asked_for_again(spillway: PlayedSystem) -> None:
    turns = [{"calls": [["Shallow", {"level_cm": level_cm}]]} for level_cm in (277, 77)]
    messages = [{"role": "user", "content": spillway.play(*turns)}]
    client = patched(spillway, "TOOLS")
    ask = {"model": spillway.model, "messages": messages, "response_model": Shallow}
    assert client.create(**ask, max_retries=2).level_cm == 77
