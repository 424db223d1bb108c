"""The invariants between any two steps of an engine."""

from collections import Counter

from engine import LLMEngine
from engine.scheduler import Scheduler


def check_engine(engine: LLMEngine) -> None:
    """Assert that the states of choices, scheduler and block pool agree."""
    scheduler = engine._scheduler
    choices = [choice for choices in engine._choices.values() for choice in choices]
    assert all(engine._choice_of[choice.sequence] is choice for choice in choices)
    assert len(choices) == len(engine._choice_of) == len(scheduler.running) + len(scheduler.waiting)
    assert not any(choice.text.finish_reason for choice in choices), "it has ended, and still holds something"
    assert not (engine._choices.keys() & engine._compiling.keys())
    check_scheduler(scheduler)


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that sequences hold exactly the blocks they need, and share only blocks with a key."""
    pool = scheduler.block_pool
    pool.check()
    assert pool.free_blocks + pool.used_blocks == pool.total_blocks
    assert len(scheduler.running) <= scheduler.max_sequences
    assert not any(sequence.block_runs or sequence.computed_tokens for sequence in scheduler.waiting)
    owners = Counter(block for sequence in scheduler.running for run in sequence.block_runs for block in run)
    assert len(owners) == pool.used_blocks
    for block, holders in owners.items():
        assert pool._references[block] == holders
        assert holders == 1 or pool._keys[block] is not None, "shared by sequences, but not by a key"
    for sequence in scheduler.running:
        assert sequence.computed_tokens <= len(sequence.token_ids) <= sequence.max_total_tokens
        assert sequence.computed_tokens <= sequence.held_blocks * pool.block_size
        assert pool.block_size * sequence.registered_blocks <= sequence.computed_tokens
    coming = Counter(key for sequence in scheduler.running for key in sequence.block_keys[sequence.registered_blocks :])
    assert scheduler._pending_keys == coming
