"""Settings of webhooks."""

from ipaddress import IPv4Network, IPv6Network

from pydantic import Field

from protocol.process import PositiveInt, PositiveSeconds, Settings


class WebhookSettings(Settings):
    """``[webhooks]``: allowed destinations of deliveries, time limits and retries."""

    # Private networks that deliveries may go to, for internal receivers: ["10.1.0.0/16"].
    allowed_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    allow_http: bool = False  # allow endpoints without TLS
    connect_s: PositiveSeconds = 5.0
    total_s: PositiveSeconds = 15.0  # limit of one attempt: DNS lookup, connection, request and answer
    # Waits between attempts, each plus up to 10%. After the last attempt, the delivery fails. The default spans about
    # three days, as Standard Webhooks recommends.
    retries_s: tuple[PositiveSeconds, ...] = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
    in_flight: PositiveInt = 32  # concurrent attempts of a ledger process
    in_flight_per_endpoint: PositiveInt = 4  # concurrent attempts per endpoint; 1 while the endpoint fails
    max_waiting_per_endpoint: PositiveInt = 10_000  # waiting deliveries per endpoint; further events are not delivered
    keep_days: PositiveInt = Field(default=14, le=365)  # how long ended deliveries are kept
    budget_check_s: PositiveSeconds = 15.0  # period of the budget checks
    # Timing of the deliverer.
    poll_s: float = 1.0  # period of the search for due deliveries
    lease_s: float = 15.0  # added to total_s: when the attempt of a killed process is repeated
    state_s: float = 5.0  # period of the messages for the gateways' metrics
