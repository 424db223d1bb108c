"""Move from one user with a password to credentials; streams come along (docs/explanation/security.md)."""

from pathlib import Path

from protocol import subjects
from protocol.nats import topology
from protocol.nats.access import access_options
from protocol.nats.bus import Bus
from tests.integration.credentials.conftest import MODEL, Queue
from tests.nats_server import ACCOUNTS
from tests.waiting import HANGS_S, until


async def test_streams_and_connections_move_to_accounts_with_credentials(queue_server: Queue) -> None:
    queue, server = queue_server, queue_server.server
    server.stop()
    signed, server.accounts = server.accounts, ACCOUNTS
    server.start()
    url = server.url.replace("//", "//spillway:spillway@")
    options = access_options(queue.folder / "gateway.creds", None, "gateway")
    gateway = await Bus.connect(url, name="gateway", options=options)  # the server asks for no signature, and gets none
    await topology.apply(gateway, [MODEL], topology.QueueBounds(), limit_s=HANGS_S)
    await gateway.publish_durable(subjects.REQUEST_USAGE_SUBJECT, b"record", message_id="1")

    server.stop()
    streams = Path(server.folder) / "jetstream"
    (streams / "SPILLWAY").rename(streams / queue.authority.account_id())
    server.accounts = signed
    server.start()
    await until(lambda: gateway.client.stats["reconnects"] and gateway.connected)
    assert (await gateway.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]["messages"] == 1
    await gateway.close()
