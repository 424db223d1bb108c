"""How an attempt goes on with what earlier ones have made of an answer."""

from typing import Literal

from protocol.chat import TAKES_IDS, TAKES_MESSAGES, Input
from protocol.messages import Job

# "ids": from the very token ids; "text": from the answer's text, encoded anew or as it is; "message": from an
# assistant's message; "start": nothing was made yet, or nothing of it was told.
Rescue = Literal["ids", "text", "message", "start"]


def rescue_of(job: Job, takes: Input) -> Rescue | None:
    """How a worker that takes such input goes on with a job; None for a first attempt, and where no text is made."""
    if job.pooling is not None:
        return None
    is_begun = any(point.token_ids or point.text for point in job.resume)
    return rescue_by(job.attempt, takes, is_begun=is_begun, is_encoded=any(point.is_encoded for point in job.resume))


def rescue_by(attempt: int, takes: Input, *, is_begun: bool, is_encoded: bool) -> Rescue | None:
    """The same, by what it depends on. ``is_encoded``: see ``ResumePoint``."""
    if attempt == 1:
        return None
    if not is_begun:
        return "start"
    if takes == TAKES_MESSAGES:
        return "message"
    return "ids" if takes == TAKES_IDS and not is_encoded else "text"
