"""Resuming an answer that earlier attempts have begun."""

from typing import Literal

from protocol.chat import TAKES_IDS, TAKES_MESSAGES, Input
from protocol.messages import Job

# "ids": from the very token ids; "text": from the answer's text, encoded again or as it is; "message": from an
# assistant's message; "start": nothing was made yet, or nothing of it was told.
Rescue = Literal["ids", "text", "message", "start"]


def rescue_of(job: Job, takes: Input) -> Rescue | None:
    """Return how a worker that takes such input resumes a job; None for a first attempt, and for a pooling job."""
    if job.pooling is not None:
        return None
    is_begun = any(point.token_ids or point.text for point in job.resume)
    return rescue_by(job.attempt, takes, is_begun=is_begun, is_encoded=any(point.is_encoded for point in job.resume))


def rescue_by(attempt: int, takes: Input, *, is_begun: bool, is_encoded: bool) -> Rescue | None:
    """Return the same as ``rescue_of``, from the fields it depends on. ``is_encoded``: see ``ResumePoint``."""
    if attempt == 1:
        return None
    if not is_begun:
        return "start"
    if takes == TAKES_MESSAGES:
        return "message"
    return "ids" if takes == TAKES_IDS and not is_encoded else "text"
