"""The console as a part of a gateway's process: pages, the admin API and the login."""

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from fastapi import FastAPI

from console.admin.routes import add_admin_answers, admin_router
from console.admin.schema import ADMIN_BODIES
from console.admin.service import AdminService
from console.dashboard.reader import Reader
from console.dashboard.routes import dashboard_routers
from console.dashboard.shell import Pages
from console.login.login import Login
from console.login.routes import add_login_answers, login_router
from console.settings import ConsoleSettings, LoginSettings
from console.usage import usage_routers
from gateway.mount import GatewayParts, Mount, Mounted
from ledger.webhooks.endpoints import Endpoints
from ledger.webhooks.secrets import SecretBox
from ledger.webhooks.settings import WebhookSettings

NO_SETTINGS: Final = ConsoleSettings()


def mount(login: LoginSettings, webhooks: WebhookSettings, console: ConsoleSettings = NO_SETTINGS) -> Mount:
    """Return what ``gateway.main.run`` mounts."""

    @contextlib.asynccontextmanager
    async def mounted(parts: GatewayParts) -> AsyncIterator[Mounted]:
        async with Reader(parts.settings.database_url) as reader:
            logins = Login(parts.database, login, parts.settings.key_pepper)
            endpoints = Endpoints(parts.database, webhooks, SecretBox(parts.settings.key_pepper))
            admin = AdminService(parts, logins, endpoints)
            pages = Pages(parts, admin, logins, reader, grafana_url=console.grafana_url)
            usage = usage_routers(admin, parts.keys, reader)
            routers = (admin_router(admin), *usage, login_router(logins), *dashboard_routers(pages))
            yield Mounted(routers, ADMIN_BODIES, _add_answers)

    return mounted


def _add_answers(app: FastAPI) -> None:
    add_login_answers(app)
    add_admin_answers(app)
