"""A tenant's storage usage, from message subjects."""

from gateway.responses.messages import KIB
from gateway.responses.usage import Usage, usage_of


def test_the_largest_size_of_a_running_response_counts() -> None:
    ended = {"res.t.resp_1.done.3": 1, "res.t.resp_2.done.4": 1}
    made = {"res.t.resp_2.size.2": 1, "res.t.resp_3.size.64": 1, "res.t.resp_3.size.160": 1}
    assert usage_of(ended, made) == Usage(3, (3 + 4 + 2 + 160) * KIB)
