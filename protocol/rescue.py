"""How an attempt goes on with what earlier ones have made of an answer."""

from typing import Literal

from protocol.chat import TAKES_IDS, TAKES_MESSAGES, Input
from protocol.messages import Job

# "ids": from the very token ids; "text": from the answer's text, encoded anew or as it is; "message": from an
# assistant's message; "start": nothing was made yet, or nothing of it was told.
Rescue = Literal["ids", "text", "message", "start"]


def rescue_of(job: Job, takes: Input) -> Rescue | None:
    """How a worker that takes such input goes on with a job; None for a first attempt, and where no text is made."""
    if job.attempt == 1 or job.pooling is not None:
        return None
    if not any(point.token_ids or point.text for point in job.resume):
        return "start"
    if takes == TAKES_MESSAGES:
        return "message"
    return "ids" if takes == TAKES_IDS and not any(point.is_encoded for point in job.resume) else "text"
