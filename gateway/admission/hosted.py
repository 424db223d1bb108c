"""The pools that may serve a request: hosted ones by its policy, trusted ones by its key."""

from db.accounts.keyring import KeyRing
from db.accounts.principal import Leaves, Principal, allowed_providers
from gateway.admission.control import AdmissionControl
from gateway.errors import HostedNotAllowed, NoTrustedPool, OnlyTrustedPools
from gateway.request.request import Admission
from gateway.settings import GatewaySettings


def providers_for(
    settings: GatewaySettings, principal: Principal, configured: Leaves | None, model: str, *, asked: bool | None
) -> tuple[str, ...]:
    """Return the providers of hosted pools that may serve this request for a model. Raises HostedNotAllowed.

    ``configured``: the tenant's policy in the configuration; ``asked``: the request's ``allow_hosted``.
    """
    serving = dict.fromkeys(pool.provider for pool in settings.hosted.values() if model in pool.models)
    if not serving:
        return ()
    allowed = () if asked is False else allowed_providers(principal, configured, serving, model)
    if not allowed and (asked or (model in settings.only_hosted and not principal.trusted_only)):
        raise HostedNotAllowed(_why_not(list(serving), model, asked=asked), param="allow_hosted")
    return allowed


def check_trust(settings: GatewaySettings, principal: Principal, model: str) -> None:
    """Raise NoTrustedPool or OnlyTrustedPools if no pool of the model may serve this client."""
    if principal.trusted_only and model not in settings.trusted:
        message = f"This API key or its team requires trusted pools, but the model {model!r} has none."
        raise NoTrustedPool(message, param="model")
    if model in settings.only_trusted and not principal.trusted_only:
        message = f"Only trusted pools serve the model {model!r}. They accept only keys that require trusted pools."
        raise OnlyTrustedPools(message, param="model")


def providers_still_allowed(keys: KeyRing, control: AdmissionControl, admission: Admission) -> tuple[str, ...]:
    """Return the request's providers that its key, team and configuration still allow."""
    principal = keys.holder_of(admission.principal.key_id)
    if principal is None:
        return ()
    return allowed_providers(principal, control.hosted_leaves(principal), admission.hosted, admission.model)


def _why_not(serving: list[str], model: str, *, asked: bool | None) -> str:
    where = " or ".join(serving)
    if asked is False:
        return f"Only {where} serves the model {model!r}, but the request sets 'allow_hosted' to false."
    return (
        f"This API key may not send prompts to {where} for the model {model!r}: the 'allow_hosted' policy of the key"
        " and its team does not permit it."
    )
