"""Settings of the console."""

import re
from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator, model_validator

from protocol.process import HttpUrlText, PositiveSeconds, Settings, http_url_parts


class OidcSettings(Settings):
    """Login by an OpenID Connect issuer (authorization code with PKCE). Users not allowed below are refused."""

    issuer: HttpUrlText  # as in its discovery document, without "/.well-known/openid-configuration"
    client_id: str
    client_secret: SecretStr | None = None  # None: a public client, by PKCE alone
    scopes: tuple[str, ...] = ("openid", "email", "profile")
    allowed_emails: tuple[str, ...] = ()  # addresses; "@example.com" allows all of a domain
    allowed_groups: tuple[str, ...] = ()
    groups_claim: str = "groups"  # the claim with a user's groups

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
        for email in emails:
            name, at, domain = email.rpartition("@")
            if not at or not domain or "@" in name or re.search(r"[\s*<>,;]", email):
                advice = f'; all of a domain: "@{domain.strip("*@<> ")}"' if domain.strip("*@<> ") else ""
                raise ValueError(f'{email!r} is no address such as "ann@example.com"{advice}')
        return emails

    @model_validator(mode="after")
    def _somebody_must_be_allowed(self) -> "OidcSettings":
        if not self.allowed_emails and not self.allowed_groups:
            raise ValueError("allowed_emails or allowed_groups is required: without either, nobody can log in")
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
