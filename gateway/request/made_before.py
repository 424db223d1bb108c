"""What another gateway has received of an answer that this one goes on with."""

from collections.abc import Sequence

from msgspec import Struct

from protocol.job import Deltas, Tokens


class MadeBefore(Struct, frozen=True):
    """The frames of an answer's beginning."""

    frames: Sequence[Tokens | Deltas] = ()
    attempt: int = 0  # the last that is known of; 0: none
    revision: str = ""  # protocol.job.Accepted.revision of whoever has made them
