"""Settings of webhooks."""

from ipaddress import IPv4Network, IPv6Network

from pydantic import Field

from protocol.process import PositiveInt, PositiveSeconds, Settings


class WebhookSettings(Settings):
    """``[webhooks]``: where deliveries may go, their time limits, and when they are tried again."""

    # Networks that are not public and may be sent to all the same, for receivers inside: ["10.1.0.0/16"].
    allowed_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    allow_http: bool = False  # endpoints without TLS
    connect_s: PositiveSeconds = 5.0
    total_s: PositiveSeconds = 15.0  # of one attempt: name look-up, connection, request and answer
    # Waits between attempts, each lengthened by up to a tenth; after the last one a delivery is given up. As the
    # scheme recommends: over some three days.
    retries_s: tuple[PositiveSeconds, ...] = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
    in_flight: PositiveInt = 32  # attempts at once, of a ledger process
    in_flight_per_endpoint: PositiveInt = 4  # of these; one while an endpoint fails
    max_waiting_per_endpoint: PositiveInt = 10_000  # deliveries; what comes beyond them is not delivered
    keep_days: PositiveInt = Field(default=14, le=365)  # how long deliveries that are over can be looked at
    budget_check_s: PositiveSeconds = 15.0  # between two looks at the teams' budgets
    # The pace of the deliverer itself.
    poll_s: float = 1.0  # between two looks for what is due
    lease_s: float = 15.0  # past total_s, until an attempt of a process that was killed is repeated
    state_s: float = 5.0  # between two messages to the gateways' metrics
