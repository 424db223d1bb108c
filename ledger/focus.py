"""Usage in the columns of FOCUS, the FinOps Open Cost and Usage Specification (https://focus.finops.org, version 1.0).

One row is the charge of one key for one model in one day or month. Spillway charges for nothing else, so the four
costs are equal. Without a price, the cost is 0 and ``x_UnpricedTokens`` has the number of tokens.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from db.money import usd_text
from ledger.csv_cells import guarded
from ledger.queries.usage import Usage, UsageBy
from ledger.queries.window import Window

# The dimensions of an export's rows, in addition to day or month.
FOCUS_BY: Final[tuple[UsageBy, ...]] = ("team", "key", "model")
PROVIDER: Final = "Spillway"
COLUMNS: Final = (
    "BillingAccountId",
    "BillingAccountName",
    "BilledCost",
    "EffectiveCost",
    "ListCost",
    "ContractedCost",
    "BillingCurrency",
    "BillingPeriodStart",
    "BillingPeriodEnd",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ServiceCategory",
    "ServiceName",
    "ProviderName",
    "PublisherName",
    "InvoiceIssuerName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "SubAccountId",
    "SubAccountName",
    "SkuId",
    "ConsumedQuantity",
    "ConsumedUnit",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "Tags",
    "x_Requests",
    "x_PromptTokens",
    "x_CachedTokens",
    "x_CompletionTokens",
    "x_UnpricedTokens",
)


def focus_rows(rows: Sequence[Usage], names: Mapping[str, str], billing: Window) -> list[list[object]]:
    """Return the header and a line for each of ``rows``, which are grouped by FOCUS_BY and optionally by day or month.

    ``billing``: the requested period; ``names``: of teams and keys.
    """
    return [list(COLUMNS), *(guarded(_row(row, names, billing), COLUMNS) for row in rows)]


def _row(row: Usage, names: Mapping[str, str], billing: Window) -> Mapping[str, Any]:
    sums, cost = row.sums, usd_text(row.sums.charge_nano_usd)
    team, key, model = row.team_id or "", row.key_id or "", row.model or ""
    return {
        **dict.fromkeys(("BillingAccountId", "BillingAccountName"), PROVIDER),
        **dict.fromkeys(("BilledCost", "EffectiveCost", "ListCost", "ContractedCost"), cost),
        "BillingCurrency": "USD",
        "BillingPeriodStart": _moment(billing.since_unix_ms),
        "BillingPeriodEnd": _moment(billing.until_unix_ms),
        "ChargePeriodStart": _moment(row.since_unix_ms),
        "ChargePeriodEnd": _moment(row.until_unix_ms),
        "ChargeCategory": "Usage",
        "ChargeClass": "",  # no correction of an earlier period
        "ChargeDescription": f"Tokens of {model}",
        "ChargeFrequency": "Usage-Based",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "LLM inference",
        **dict.fromkeys(("ProviderName", "PublisherName", "InvoiceIssuerName"), PROVIDER),
        "ResourceId": key,
        "ResourceName": names.get(key, key),
        "ResourceType": "API key",
        "SubAccountId": team,
        "SubAccountName": names.get(team, team),
        "SkuId": model,
        "ConsumedQuantity": sums.tokens,
        "ConsumedUnit": "Tokens",
        "PricingCategory": "Standard",
        "PricingQuantity": sums.tokens,
        "PricingUnit": "Tokens",
        "Tags": json.dumps({"team": names.get(team, team), "key": names.get(key, key), "model": model}),
        "x_Requests": sums.requests,
        "x_PromptTokens": sums.prompt_tokens,
        "x_CachedTokens": sums.cached_tokens,
        "x_CompletionTokens": sums.completion_tokens,
        "x_UnpricedTokens": sums.unpriced_tokens,
    }


def _moment(unix_ms: int) -> str:
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
