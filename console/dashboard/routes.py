"""/dashboard: all pages require a login; only the static files are public."""

from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from console.dashboard.account_routes import add_account_pages
from console.dashboard.audit_routes import add_audit_pages
from console.dashboard.export_routes import add_export_pages
from console.dashboard.latency import latency_chart
from console.dashboard.pages.batches import batch_detail, batches, running_rows
from console.dashboard.pages.cost import cost
from console.dashboard.pages.fleet import fleet
from console.dashboard.pages.latency import latency
from console.dashboard.pages.models import models
from console.dashboard.pages.overview import overview
from console.dashboard.pages.pools import pools
from console.dashboard.pages.refusals import refusals
from console.dashboard.pages.requests import request_detail, request_log, request_rows
from console.dashboard.pages.search import find_page
from console.dashboard.pages.set_aside import set_aside
from console.dashboard.pages.tokens import tokens, tokens_heat
from console.dashboard.payload import read_payload_values
from console.dashboard.playground import add_playground
from console.dashboard.render import HEADERS, static_file
from console.dashboard.session_routes import add_session_pages
from console.dashboard.shell import PageRoute, Pages
from console.dashboard.view import ZONE_COOKIE, find_zone
from console.login.forms import read_form
from console.login.login import local_page
from console.rules import person_of
from gateway.errors import InvalidParameter, UnknownUrl

COOKIE_LIFE_S: Final = 31_536_000


def dashboard_routers(pages: Pages) -> list[APIRouter]:
    """Build the routers of /dashboard."""
    closed = APIRouter(
        prefix="/dashboard", include_in_schema=False, route_class=PageRoute, dependencies=[Depends(pages.require_login)]
    )
    for add in (
        _add_ledger_pages,
        _add_request_pages,
        _add_batch_pages,
        _add_live_pages,
        _add_alert_pages,
        add_account_pages,
        add_export_pages,
        add_audit_pages,
        add_playground,
        add_session_pages,
        _add_others,
    ):
        add(closed, pages)
    return [_static_router(), closed]


def _static_router() -> APIRouter:
    router = APIRouter(prefix="/dashboard/static", include_in_schema=False)

    @router.get("/{version}/{name}")
    async def static(version: str, name: str) -> Response:
        found = static_file(version, name)
        if found is None:
            raise UnknownUrl("There is no such file.")
        return found

    return router


def _add_ledger_pages(router: APIRouter, pages: Pages) -> None:
    @router.get("")
    async def show_overview(request: Request) -> Response:
        return await pages.show(request, "overview.html", overview, live=pages.live_numbers(request))

    @router.get("/tokens")
    async def show_tokens(request: Request, heat: str = "") -> Response:
        return await pages.show(request, "tokens.html", partial(tokens, heat=heat))

    @router.get("/tokens/heat")
    async def show_tokens_heat(request: Request, heat: str = "") -> Response:
        return await pages.show(request, "heat.html", partial(tokens_heat, heat=heat))

    @router.get("/latency")
    async def show_latency(request: Request) -> Response:
        return await pages.show(request, "latency.html", latency)

    @router.get("/latency/chart")
    async def show_latency_chart(request: Request, measure: str = "") -> Response:
        return await pages.show(request, "chart.html", partial(latency_chart, name=measure))

    @router.get("/cost")
    async def show_cost(request: Request) -> Response:
        return await pages.show(request, "cost.html", cost)

    @router.get("/refusals")
    async def show_refusals(request: Request, code: str = "", older: str = "") -> Response:
        return await pages.show(request, "refusals.html", partial(refusals, code=code, older=older))

    @router.get("/set-aside")
    async def show_set_aside(request: Request, older: str = "") -> Response:
        return await pages.show(request, "set_aside.html", partial(set_aside, older=older))

    @router.get("/fleet")
    async def show_fleet(request: Request) -> Response:
        return await pages.show(request, "fleet.html", fleet)


def _add_request_pages(router: APIRouter, pages: Pages) -> None:
    @router.get("/requests")
    async def show_requests(request: Request, older: str = "", live: str = "", order: str = "") -> Response:
        ask = partial(request_log, older=older, order=order)
        return await pages.show(request, "requests.html", ask, is_live=bool(live) and not order)

    @router.get("/requests/rows")
    async def show_request_rows(request: Request, older: str = "") -> Response:
        return await pages.show(request, "request_rows.html", partial(request_rows, older=older))

    @router.get("/requests/{request_id:path}")
    async def show_request(request: Request, request_id: str) -> Response:
        kept = await read_payload_values(pages, request_id, person_of(request))
        return await pages.show(request, "request.html", partial(request_detail, request_id=request_id), **kept)


def _add_batch_pages(router: APIRouter, pages: Pages) -> None:
    @router.get("/batches")
    async def show_batches(request: Request, older: str = "") -> Response:
        return await pages.show(request, "batches.html", partial(batches, older=older))

    @router.get("/batches/running")
    async def show_running_batches(request: Request) -> Response:
        return await pages.show(request, "batches_running.html", running_rows)

    @router.get("/batches/{batch_id}")
    async def show_batch(request: Request, batch_id: str) -> Response:
        return await pages.show(request, "batch.html", partial(batch_detail, batch_id=batch_id))


def _add_live_pages(router: APIRouter, pages: Pages) -> None:
    @router.get("/live")
    async def stream_numbers() -> Response:
        return StreamingResponse(pages.live.stream(), headers=HEADERS, media_type="text/event-stream")

    @router.get("/pools")
    async def show_pools(request: Request) -> Response:
        now = _pools_now(pages)
        ask = partial(pools, live={pool.pool for pool in now["pools"]})
        return await pages.show(request, "pools.html", ask, failovers=pages.live.failovers(), **now)

    @router.get("/models")
    async def show_models(request: Request) -> Response:
        return await pages.show(request, "models.html", partial(models, known=pages.live.models_now()))

    @router.get("/pools/now")
    async def show_pools_now(request: Request) -> Response:
        return await pages.show_memory(request, "pools_now.html", _pools_now(pages))


def _add_alert_pages(router: APIRouter, pages: Pages) -> None:
    @router.get("/alerts")
    async def show_alerts(request: Request) -> Response:
        values = {"page": "Alerts", "alerts": await pages.alerts.now()}
        return await pages.show_memory(request, "alerts.html", values)

    @router.get("/alerts/strip")
    async def show_alert_strip(request: Request) -> Response:
        return await pages.show_memory(request, "alert_strip.html", {"alerts": await pages.alerts.now()})


def _pools_now(pages: Pages) -> dict[str, Any]:
    return {"pools": pages.live.pools(), "queues": pages.live.queues()}


def _add_others(router: APIRouter, pages: Pages) -> None:
    @router.get("/search")
    async def search(request: Request, q: str = "") -> Response:
        return await pages.find(request, partial(find_page, text=q))

    @router.post("/zone")
    async def choose_zone(request: Request) -> Response:
        zone = (await read_form(request)).get("zone", "").strip()
        if find_zone(zone) is None:
            raise InvalidParameter(f"{zone!r} is not an IANA time zone such as Europe/Berlin.", param="zone")
        response = RedirectResponse(_page_before(request), 303)
        response.set_cookie(ZONE_COOKIE, zone, max_age=COOKIE_LIFE_S, path="/dashboard", samesite="lax")
        return response


def _page_before(request: Request) -> str:
    """Return the page that a form was sent from."""
    _, _, after_host = request.headers.get("referer", "").partition("://")
    return local_page("/" + after_host.partition("/")[2])
