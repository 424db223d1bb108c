"""A bad item among many: it is set aside, whichever error it raises, and the others are written."""

import asyncio
from collections.abc import Sequence

import pytest
from sqlalchemy.exc import IntegrityError, OperationalError

from db.apart import write_apart
from db.engine import DatabaseUnavailable


def refusal() -> Exception:
    return IntegrityError("INSERT", {}, Exception("out of range"))


@pytest.mark.parametrize("error", [refusal(), OverflowError("too large"), ValueError("NaN"), RecursionError()])
@pytest.mark.parametrize("poisonous", [{0}, {999}, {7, 8, 500}])
def test_the_others_are_written_in_few_transactions(error: Exception, poisonous: set[int]) -> None:
    written: list[int] = []
    set_aside: dict[int, str] = {}
    tries = 0

    async def write(items: Sequence[int]) -> None:
        nonlocal tries
        tries += 1
        if poisonous & set(items):
            raise error
        written.extend(items)

    asyncio.run(write_apart(range(1000), write, set_aside.__setitem__))
    assert written == [item for item in range(1000) if item not in poisonous]
    assert set(set_aside) == poisonous
    assert all(set_aside.values())
    assert tries <= 21 * len(poisonous)


def test_nothing_is_set_aside_while_sql_is_away() -> None:
    async def write(_: Sequence[int]) -> None:
        raise OperationalError("INSERT", {}, Exception("disk I/O error"))

    with pytest.raises(DatabaseUnavailable):
        asyncio.run(write_apart([1, 2], write, lambda *_: pytest.fail("set aside")))


def test_of_nothing_nothing_is_written() -> None:
    async def write(_: Sequence[int]) -> None:
        pytest.fail("written")

    asyncio.run(write_apart([], write, lambda *_: None))
