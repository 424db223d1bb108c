"""A short version of `make leaks`, which runs 10,000 requests."""

import gc

from engine.text.grammar import MAX_COMPILED
from tests.unit.engine.invariants import check_engine
from tests.unit.engine.leaks import held, make_engine, storm


def test_a_thousand_requests_canceled_at_random_leave_nothing() -> None:
    engine = make_engine()
    objects, before = 0, engine.load()
    for step, came in enumerate(storm(engine, 1000, seed=3)):
        if step % 8 == 0:
            check_engine(engine)
        if came > 200 and not objects:
            objects = count_objects()
    assert engine.counters.preemptions > 0
    assert not any(held(engine).values())
    assert engine.load() == before
    assert len(engine._vocabularies[None].grammars._compiled) <= MAX_COMPILED
    assert count_objects() < objects + 800, "one or more for each request"


def count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())
