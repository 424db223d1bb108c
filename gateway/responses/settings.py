"""Settings of responses that are kept."""

from protocol.settings import PositiveInt, PositiveSeconds, Settings


class ResponseSettings(Settings):
    """``[responses]``: which responses are kept, for how long, and how much of them."""

    store_by_default: bool = False  # whether a request that does not say ``store`` is stored, as OpenAI does it
    keep_s: PositiveSeconds = 30 * 24 * 3600.0
    events_s: PositiveSeconds = 24 * 3600.0  # how long the events of a background response can be read again
    max_response_bytes: PositiveInt = 4 * 1024**2  # of one, with its conversation, compressed
    max_tenant_bytes: PositiveInt = 256 * 1024**2
    max_tenant_responses: PositiveInt = 10_000
    take_over_s: PositiveSeconds = 2.0  # between two looks for responses whose gateway is gone
    retry_s: PositiveSeconds = 5.0  # before a response that could not be made is tried again
    silence_s: PositiveSeconds = 10.0  # a gateway that is connected and does not answer for longer is gone, too
