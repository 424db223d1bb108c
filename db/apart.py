"""Writing many items in one transaction: an item that the database rejects is set aside, the others are written.

Otherwise, a consumer of a queue would receive the rejected item again after each restart, and block on it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, is_refusal

_Item = TypeVar("_Item")


async def write_apart(
    items: Sequence[_Item], write: Callable[[Sequence[_Item]], Awaitable[None]], set_aside: Callable[[_Item, str], None]
) -> None:
    """Write all items. If one fails, write each half separately; ``set_aside`` gets the failing item and the reason.

    ``write`` must be atomic. By bisection, one bad item of a thousand costs twenty transactions, not a thousand. Raises
    DatabaseUnavailable: call again; items already written are written again.
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
    except Exception as error:  # noqa: BLE001  # sqlite3's OverflowError, or a bug that one of the items triggers
        reason = f"{type(error).__name__}: {error}"
    else:
        return
    if len(items) == 1:
        set_aside(items[0], reason)
        return
    middle = len(items) // 2
    for half in (items[:middle], items[middle:]):
        await write_apart(half, write, set_aside)
