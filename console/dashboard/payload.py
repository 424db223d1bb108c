"""The stored payload on the page of a request, where its key or team consented to storage."""

import asyncio
import json
from typing import Any, Final

from console.dashboard.shell import Pages
from db.accounts.roles import Person
from ledger.payloads.errors import BrokenPayload, PayloadKeyMissing, UnknownPayload
from ledger.payloads.sealing import Sealer, parse_keys
from ledger.payloads.store import read_payload

MAX_SHOWN_CHARS: Final = 200_000  # of the request, and of the answer


async def read_payload_values(pages: Pages, request_id: str, who: Person) -> dict[str, Any]:
    """Return values of request.html: the payload (None: none is stored, or not for this person), or the problem.

    Raises SQL's own errors.
    """
    if not who.may("read_payloads"):
        return {"payload": None, "problem": None}
    sealer = Sealer(parse_keys(pages.gateway.settings.payloads.key))
    try:
        teams = who.teams_for("read_payloads")
        payload = await read_payload(pages.gateway.database, request_id, sealer, who.actor, team_ids=teams)
    except UnknownPayload:
        return {"payload": None, "problem": None}
    except (PayloadKeyMissing, BrokenPayload) as error:
        return {"payload": None, "problem": str(error)}
    asked, answered = await asyncio.to_thread(lambda: (_text(payload.request), _text(payload.choices)))
    return {"payload": payload, "problem": None, "asked": asked, "answered": answered}


def _text(value: object) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "\n… truncated"
