"""Who a request comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller that an API key stands for."""

    key_id: str  # ApiKeyRow.id
    key_name: str
    tenant: str  # the fairness domain; the key itself until keys belong to teams
