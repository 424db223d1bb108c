"""Outgoing frames: the wire format, and messages no larger than the server accepts."""

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pool_worker.publisher import Publisher, split_frames
from protocol import job as m
from protocol.job import StepFrame, decode_step
from protocol.nats.bus import Bus
from tests.waiting import HANGS_S


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=60), st.integers(10, 200))
def test_parts_hold_all_frames_in_order_within_the_limit(frames: list[bytes], limit_bytes: int) -> None:
    parts = split_frames(frames, limit_bytes)
    assert [frame for part in parts for frame in part] == frames
    assert all(len(part) == 1 or sum(map(len, part)) <= limit_bytes for part in parts)
    # No two neighbors would fit into one message.
    for one, other in pairwise(parts):
        assert sum(map(len, one)) + len(other[0]) > limit_bytes


async def test_frames_are_sent_as_step_frames_and_large_ones_are_split(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="test")
    steps: asyncio.Queue[StepFrame] = asyncio.Queue()

    async def on_step(message) -> None:
        await steps.put(decode_step(message.data))

    await bus.subscribe("fr.g", on_step)
    publisher = Publisher(bus, "w1")
    frames = [m.Tokens("r", 1, seq, 0, (seq,), "x" * 3_000_000) for seq in range(5)]
    for frame in frames:
        publisher.send("fr.g", m.encode(frame))
    await publisher.flush()
    async with asyncio.timeout(HANGS_S):
        received = [await steps.get() for _ in range(3)]
    assert [frame for step in received for frame in step.frames] == frames
    assert [len(step.frames) for step in received] == [2, 2, 1]
    assert {step.worker_id for step in received} == {"w1"}
    await bus.close()


async def test_an_oversized_frame_is_dropped_and_later_ones_are_sent(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="test")
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def on_message(message) -> None:
        await seen.put(message.data)

    await bus.subscribe("fr.g", on_message)
    publisher = Publisher(bus, "w1")
    publisher.send("fr.g", m.encode(m.Tokens("r", 1, 0, 0, (1,), "x" * 9_000_000)))
    await publisher.flush()
    publisher.send("fr.g", m.encode(m.Tokens("r", 1, 1, 0, (1,), "small")))
    await publisher.flush()
    async with asyncio.timeout(HANGS_S):
        assert b"small" in await seen.get()
    await bus.close()
