"""Settings of the console."""

import re
from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator, model_validator

from db.accounts.roles import TEAM_ROLES, Role
from protocol.process import HttpUrlText, PositiveSeconds, Settings, http_url_parts


def _checked_emails(emails: tuple[str, ...]) -> tuple[str, ...]:
    for email in emails:
        name, at, domain = email.rpartition("@")
        if not at or not domain or "@" in name or re.search(r"[\s*<>,;]", email):
            advice = f'; all of a domain: "@{domain.strip("*@<> ")}"' if domain.strip("*@<> ") else ""
            raise ValueError(f'{email!r} is not an email address such as "ann@example.com"{advice}')
    return emails


class RoleRule(Settings):
    """The role of some of an issuer's users. Of several rules that match, the role that may do most counts."""

    role: Role
    groups: tuple[str, ...] = ()
    emails: tuple[str, ...] = ()  # addresses; "@example.com" means all of a domain
    teams: tuple[str, ...] = ()  # names or ids of the teams that a manager or member has this role in

    @field_validator("emails")
    @classmethod
    def _addresses_must_be_addresses(cls, emails: tuple[str, ...]) -> tuple[str, ...]:
        return _checked_emails(emails)

    @model_validator(mode="after")
    def _must_say_who_and_where(self) -> "RoleRule":
        if not self.groups and not self.emails:
            raise ValueError("groups or emails is required: they name the users with this role")
        if self.role in TEAM_ROLES and not self.teams:
            raise ValueError(f"teams is required: a {self.role} has this role in teams")
        if self.role not in TEAM_ROLES and self.teams:
            raise ValueError(f"teams is not for the role {self.role!r}, which holds for the whole installation")
        return self


class OidcSettings(Settings):
    """Login by an OpenID Connect issuer (authorization code with PKCE). Users not allowed below are refused."""

    issuer: HttpUrlText  # as in its discovery document, without "/.well-known/openid-configuration"
    client_id: str
    client_secret: SecretStr | None = None  # None: a public client, by PKCE alone
    scopes: tuple[str, ...] = ("openid", "email", "profile")
    # Without roles: who may log in, all of them with the role admin.
    allowed_emails: tuple[str, ...] = ()  # addresses; "@example.com" allows all of a domain
    allowed_groups: tuple[str, ...] = ()
    groups_claim: str = "groups"  # the claim with a user's groups
    roles: tuple[RoleRule, ...] = ()  # instead of both lists: who may log in, and with which role

    @field_validator("issuer")
    @classmethod
    def _issuer_must_be_https(cls, issuer: str) -> str:
        parts = urlsplit(issuer)
        if parts.scheme != "https" and parts.hostname not in {"localhost", "127.0.0.1", "::1"}:
            raise ValueError("must be https: without TLS, anyone on the network path could log in")
        return issuer

    @field_validator("allowed_emails")
    @classmethod
    def _addresses_must_be_addresses(cls, emails: tuple[str, ...]) -> tuple[str, ...]:
        return _checked_emails(emails)

    @model_validator(mode="after")
    def _somebody_must_be_allowed(self) -> "OidcSettings":
        if self.roles and (self.allowed_emails or self.allowed_groups):
            raise ValueError("with roles, allowed_emails and allowed_groups must be empty: move them into roles")
        if not self.roles and not self.allowed_emails and not self.allowed_groups:
            raise ValueError("allowed_emails, allowed_groups or roles is required: without them, no user can log in")
        return self


class LoginSettings(Settings):
    """Settings of the login to the gateway's pages."""

    session_s: PositiveSeconds = 12 * 3600.0
    # The public address, e.g. "https://llm.example.com"; default: from each request. Behind a proxy that terminates
    # TLS, cookies are marked secure only if this begins with https.
    public_url: HttpUrlText | None = None
    oidc: OidcSettings | None = None

    @field_validator("public_url")
    @classmethod
    def _pages_are_at_the_root(cls, url: str | None) -> str | None:
        parts = None if url is None else http_url_parts(url)
        if parts is not None and (parts.path.strip("/") or parts.username is not None):
            raise ValueError(f"must be scheme and host alone: {parts.scheme}://{parts.netloc.rpartition('@')[2]}")
        return url


class ConsoleSettings(Settings):
    """Settings of the pages."""

    grafana_url: HttpUrlText | None = None  # a link in the navigation
