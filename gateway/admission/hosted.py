"""Pools that a request may go to: hosted APIs that its key and team allow, unless it forbids it; trusted ones."""

from db.accounts.keyring import KeyRing
from db.accounts.principal import Leaves, Principal, allowed_providers
from gateway.admission.control import AdmissionControl
from gateway.errors import HostedNotAllowed, NoTrustedPool, OnlyTrustedPools
from gateway.request.request import Admission
from gateway.settings import GatewaySettings


def providers_for(
    settings: GatewaySettings, principal: Principal, configured: Leaves | None, model: str, *, asked: bool | None
) -> tuple[str, ...]:
    """Return the providers of hosted pools to which this request for a model may go. Raises HostedNotAllowed.

    ``configured``: what the configuration says of the tenant; ``asked``: what the request says.
    """
    serving = dict.fromkeys(pool.provider for pool in settings.hosted.values() if model in pool.models)
    if not serving:
        return ()
    allowed = () if asked is False else allowed_providers(principal, configured, serving, model)
    if not allowed and (asked or (model in settings.only_hosted and not principal.trusted_only)):
        raise HostedNotAllowed(_why_not(list(serving), model, asked=asked), param="allow_hosted")
    return allowed


def check_trust(settings: GatewaySettings, principal: Principal, model: str) -> None:
    """Raise NoTrustedPool or OnlyTrustedPools where the model's pools are of the wrong kind for this client."""
    if principal.trusted_only and model not in settings.trusted:
        message = f"This API key or its team demands trusted pools, and none is configured for the model {model!r}."
        raise NoTrustedPool(message, param="model")
    if model in settings.only_trusted and not principal.trusted_only:
        message = f"Only trusted pools serve the model {model!r}: they take requests of keys that demand them alone."
        raise OnlyTrustedPools(message, param="model")


def providers_still_allowed(keys: KeyRing, control: AdmissionControl, admission: Admission) -> tuple[str, ...]:
    """Return those of a request's providers that its key, team and configuration allow now."""
    principal = keys.holder_of(admission.principal.key_id)
    if principal is None:
        return ()
    return allowed_providers(principal, control.hosted_leaves(principal), admission.hosted, admission.model)


def _why_not(serving: list[str], model: str, *, asked: bool | None) -> str:
    where = " or ".join(serving)
    if asked is False:
        return f"The model {model!r} is served by {where} alone, and the request says 'allow_hosted': false."
    return (
        f"Prompts of this API key may not go to {where} for the model {model!r}: the 'allow_hosted' policy of the key"
        " and its team does not say so."
    )
