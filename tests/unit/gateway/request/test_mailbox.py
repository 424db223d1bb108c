import asyncio

import pytest

from gateway.errors import Failure
from gateway.request.mailbox import (
    LOOSE_EVENTS,
    TAKEN_AT_ONCE,
    TENANT_SHARE,
    Ended,
    Event,
    HeldTokens,
    Mailbox,
    ReaderCut,
    StillWaiting,
    UnreadBytes,
    read_logprobs,
)
from protocol.errors import ErrorCode
from protocol.generation import TokenLogprob
from protocol.job import Tokens

TOP = tuple((number, " word", -1.5 * number, b" word") for number in range(20))
LOGPROBS = (TokenLogprob(5, " word", -0.5, b" word", TOP),)


def tokens(seq: int, logprobs: tuple[TokenLogprob, ...] | None = None) -> Tokens:
    return Tokens("req_1", 1, seq, 0, (seq,), f" {seq}", None, logprobs)


async def read(mailbox: Mailbox) -> list[Event]:
    events: list[Event] = []
    while len(mailbox):
        events += await mailbox.take()
    return events


async def test_late_reads_return_the_same_events() -> None:
    mailbox = Mailbox()
    put: list[Event] = [tokens(number) for number in range(3 * LOOSE_EVENTS)]
    put += [StillWaiting("running"), tokens(999, LOGPROBS), Ended()]
    for event in put:
        mailbox.put(event)
    assert mailbox.held_bytes > 0
    assert await read(mailbox) == put
    assert mailbox.held_bytes == 0


async def test_a_reader_gets_a_large_backlog_in_batches() -> None:
    mailbox = Mailbox()
    for number in range(2 * TAKEN_AT_ONCE):
        mailbox.put_tokens(tokens(number, LOGPROBS))
    assert [len(await mailbox.take()) for _ in range(2)] == [TAKEN_AT_ONCE, TAKEN_AT_ONCE]


async def test_a_reader_that_keeps_up_gets_frames_as_they_came() -> None:
    mailbox = Mailbox()
    for number in range(5):
        reading = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        frame = tokens(number, LOGPROBS)
        mailbox.put_tokens(frame)
        mailbox.wake()
        [taken] = await reading
        assert taken is frame


def test_log_probabilities_count_by_their_bytes() -> None:
    """As objects, those of one token with 20 alternatives take about 5 kB."""
    mailbox = Mailbox()
    for number in range(100):
        mailbox.put_tokens(tokens(number, LOGPROBS))
    assert mailbox.held_bytes < 100 * 800


def test_all_of_a_whole_answer_is_there_until_it_is_cleared() -> None:
    mailbox = Mailbox()
    for number in range(2 * LOOSE_EVENTS):
        mailbox.put(tokens(number, LOGPROBS if number == LOOSE_EVENTS else None))
    for _ in range(2):
        held = list(mailbox.tokens())
        assert [frame.text for frame in held] == [f" {number}" for number in range(2 * LOOSE_EVENTS)]
        one = held[LOOSE_EVENTS]
        assert isinstance(one, HeldTokens)
        assert read_logprobs(one.held_logprobs) == LOGPROBS
        last = held[-1]
        assert isinstance(last, HeldTokens)
        assert last.held_logprobs is None
    mailbox.clear()
    assert (list(mailbox.tokens()), mailbox.held_bytes) == ([], 0)


async def test_a_reader_of_dropped_events_is_notified() -> None:
    mailbox, cuts = Mailbox(), []
    mailbox.on_cut = lambda: cuts.append(1)
    mailbox.put(tokens(1))
    mailbox.put(Ended())
    mailbox.cut()
    for waiting in (mailbox.take(), mailbox.wait_for_end()):
        with pytest.raises(ReaderCut):
            await waiting
    assert cuts == [1]


async def test_a_failure_survives_dropped_events() -> None:
    mailbox, end = Mailbox(), Ended(Failure(ErrorCode.TOTAL_TIMEOUT, "late"))
    mailbox.put(tokens(1))
    mailbox.put(end)
    mailbox.cut()
    await mailbox.wait_for_end()
    assert await mailbox.take() == [end]


# --- shared bounds ----------------------------------------------------------------------------------------------------


class Keeping:
    """Mailboxes that are cleared when given up."""

    def __init__(self, most_bytes: int) -> None:
        self.unread = UnreadBytes(most_bytes)
        self.given_up: list[str] = []

    def mailbox(self, tenant: str, name: str) -> Mailbox:
        mailbox = Mailbox()

        def give_up() -> None:
            self.given_up.append(name)
            mailbox.clear()

        mailbox.count_in(self.unread, tenant, give_up)
        return mailbox


def fill(mailbox: Mailbox, least_bytes: int) -> None:
    while mailbox.held_bytes < least_bytes:
        mailbox.put_tokens(tokens(1, LOGPROBS))


def test_a_tenant_beyond_its_share_loses_its_largest_answer() -> None:
    keeping = Keeping(400_000)
    large, small, other = (keeping.mailbox(*who) for who in (("a", "large"), ("a", "small"), ("b", "other")))
    fill(large, 60_000)
    fill(other, 90_000)
    assert not keeping.given_up
    while not keeping.given_up:
        fill(small, small.held_bytes + 1)
    assert keeping.given_up == ["large"]
    assert keeping.unread.held_bytes == small.held_bytes + other.held_bytes


def test_beyond_the_total_the_largest_tenant_loses_an_answer() -> None:
    keeping = Keeping(400_000)
    share = 400_000 // TENANT_SHARE
    tenants = [keeping.mailbox(f"t{number}", f"t{number}") for number in range(TENANT_SHARE)]
    for number, mailbox in enumerate(tenants):
        fill(mailbox, share - 2000 * (number + 1))
    late = keeping.mailbox("innocent", "innocent")
    while not keeping.given_up:
        fill(late, late.held_bytes + 1)
    assert keeping.given_up == ["t0"]
    for mailbox in (*tenants, late):
        mailbox.clear()
    assert keeping.unread.held_bytes == 0
