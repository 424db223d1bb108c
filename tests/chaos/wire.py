"""The wire to another place: all that its processes reach of this machine, until it is lost."""

import asyncio
import functools

from tests.chaos.proxy import CutProxy
from tests.networks import Link, Network, can_be_made


class Wire:
    """Leads to one port of ours.

    As root, the other place is a network of its own, and the wire a link to it that is pulled out. Else its processes
    are on this machine as all others, and a proxy holds back what they send and get.
    """

    def __init__(self, target_port: int) -> None:
        self.network: Network | None = None  # the other place
        self.host = "127.0.0.1"  # what the port's name is there
        self._near: Network | None = None
        self._link: Link | None = None
        listen = None
        if can_be_made():
            self._near, self.network = Network(), Network()
            self._link = Link(self._near, self.network)
            self.host = self._link.near_host
            listen = functools.partial(self._near.listen, self.host)
        self._proxy = CutProxy(target_port, listen)

    @property
    def port(self) -> int:
        """The port's number there."""
        return self._proxy.port

    async def start(self) -> None:
        await self._proxy.start()

    async def pull_out(self) -> None:
        """Lose all that is sent from now on, and tell nobody."""
        if self._link is None:
            self._proxy.silence()
        else:
            await asyncio.to_thread(self._link.cut)

    async def put_back(self) -> None:
        if self._link is None:
            self._proxy.heal()
        else:
            await asyncio.to_thread(self._link.mend)

    async def refuse(self) -> None:
        """Break every connection off, and let none through, until ``accept``."""
        self._proxy.refuse()

    async def accept(self) -> None:
        await self._proxy.accept()

    async def stop(self) -> None:
        await self._proxy.stop()
        for network in (self._near, self.network):
            if network is not None:
                network.close()
