"""Writing many items in one transaction, of which one may be poisonous: that one is set aside, the others are written.

Without this, whoever takes items from a queue meets the same one again after each restart, and all others wait for it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, is_refusal

_Item = TypeVar("_Item")


async def write_apart(
    items: Sequence[_Item], write: Callable[[Sequence[_Item]], Awaitable[None]], set_aside: Callable[[_Item, str], None]
) -> None:
    """Write all items, or if that fails because of one of them, each half apart; ``set_aside`` gets that one and why.

    ``write`` must write all of its items or none. By halves, one item of a thousand costs twenty transactions, not a
    thousand. Raises DatabaseUnavailable: call again, what has been written is written again.
    """
    if not items:
        return
    try:
        await write(items)
    except DatabaseUnavailable:
        raise
    except SQL_ERRORS as error:
        if not is_refusal(error):
            raise DatabaseUnavailable(describe(error)) from error
        reason = describe(error)
    except Exception as error:  # noqa: BLE001  # sqlite3's OverflowError, or a defect of ours that one of the items brings out
        reason = f"{type(error).__name__}: {error}"
    else:
        return
    if len(items) == 1:
        set_aside(items[0], reason)
        return
    middle = len(items) // 2
    for half in (items[:middle], items[middle:]):
        await write_apart(half, write, set_aside)
