"""What all clients ask for, and what they must get."""

from typing import Any, Final, Literal

from pydantic import BaseModel

from tests.player.engine import Turn

QUESTION: Final = "How high is the Elbe?"
THOUGHT: Final = "I should look at the gauge."
SAID: Final = "I look at the gauge."
ARGUMENTS: Final = {"river": "Elbe", "days": 2}
RESULT: Final = "277 cm"
ANSWER: Final = "The Elbe stands at 277 cm."
HELD: Final = "[[stall after=3]]"  # the answer begins and does not end
PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"river": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["river", "days"],
    "additionalProperties": False,
}
TOOL_NAME: Final = "read_gauge"
TOOL_TEXT: Final = "The height of a river's water."
PLAY: Final[tuple[Turn, ...]] = (
    {"think": THOUGHT, "say": SAID, "calls": [[TOOL_NAME, ARGUMENTS]]},
    {"expect": RESULT, "say": ANSWER},
)


class Reading(BaseModel):
    """The form of a structured answer."""

    river: Literal["Elbe", "Rhine"]
    level_cm: int


READING: Final = Reading(river="Elbe", level_cm=277)
READ: Final[Turn] = {"say": READING.model_dump_json()}
