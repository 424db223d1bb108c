"""What waits in the queue, by lane, as reported by the server."""

import datetime as dt
from dataclasses import dataclass

from protocol import subjects
from protocol.nats.bus import Bus


@dataclass(frozen=True, slots=True)
class Backlog:
    """The queue at one moment. Jobs that a worker was given and has not yet accepted count as well."""

    jobs: dict[str, int]  # by subject; empty lanes are left out
    server_time: dt.datetime
    bytes: int = 0  # of all jobs, of whatever lane
    published: int = 0  # jobs that gateways have put into any queue since the stream was made


async def read_backlog(bus: Bus, queue: str | None = None) -> Backlog:
    """Ask for the backlog of one queue or of all. Raises ApiError or BusTimeout."""
    filter_ = "rq.>" if queue is None else subjects.job_subject(queue, ">")
    info = await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}", {"subjects_filter": filter_})
    state = info["state"]
    return Backlog(
        state.get("subjects") or {}, dt.datetime.fromisoformat(info["ts"]), state["bytes"], state["last_seq"]
    )


async def oldest_job(bus: Bus, subject: str) -> str:
    """Return when the stream took the first job of a lane that it still has; empty if it has none. Raises BusError."""
    message = await bus.get_message(subjects.INTERACTIVE_STREAM, seq=1, next_by_subj=subject)
    return "" if message is None else str(message["time"])
