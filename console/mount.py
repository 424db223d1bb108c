"""The console as a part of a gateway's process: pages, the admin API and the login."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from console.admin.routes import add_admin_answers, admin_router
from console.admin.schema import ADMIN_BODIES
from console.admin.service import AdminService
from console.dashboard.reader import Reader
from console.dashboard.routes import dashboard_routers
from console.dashboard.shell import Pages
from console.login.documentation import add_documentation
from console.login.login import Login
from console.login.routes import add_login_answers, login_router
from console.settings import ConsoleSettings, LoginSettings
from gateway.mount import GatewayParts, Mount, Mounted
from gateway.settings import GatewaySettings
from gateway.tokenizing.settings import canonical_names


def mount(login: LoginSettings) -> Mount:
    """Return what ``gateway.main.run`` mounts."""

    @contextlib.asynccontextmanager
    async def mounted(parts: GatewayParts) -> AsyncIterator[Mounted]:
        settings = _settings(login, parts.settings)
        async with Reader(parts.settings.database_url) as reader:
            logins = Login(parts.database, settings)
            admin = AdminService(parts, settings, logins)
            pages = Pages(parts, admin, logins, reader)
            of_login = login_router(logins, parts.database, settings.key_pepper)
            routers = (admin_router(admin), of_login, *dashboard_routers(pages))
            yield Mounted(routers, ADMIN_BODIES, _add_answers)

    return mounted


def _add_answers(app: FastAPI) -> None:
    add_login_answers(app)
    add_admin_answers(app)
    add_documentation(app)


def _settings(login: LoginSettings, settings: GatewaySettings) -> ConsoleSettings:
    return ConsoleSettings(
        login=login,
        key_pepper=settings.key_pepper,
        payload_key=settings.payloads.key,
        data_dir=settings.data_dir,
        models=canonical_names(settings.models),
        max_body_bytes=settings.limits.max_body_bytes,
        body_s=settings.timeouts.body_s,
        webhooks=settings.webhooks,
    )
