"""Transport: the connection that Kombu opens for `redis-streams://` and its relatives."""

from __future__ import annotations

import os
from typing import Any

from kombu.transport import get_transport_cls
from kombu.transport import redis as lists
from kombu.utils.url import url_to_parts

from conquiet.kombu import options
from conquiet.kombu.channel import Channel
from conquiet.kombu.connecting import close_idle
from conquiet.kombu.errors import AlternateError
from conquiet.kombu.poller import Poller


class Transport(lists.Transport):  # type: ignore[misc]  # Kombu has no types
    """Kombu's Redis transport with streams in place of lists."""

    Channel = Channel

    def __init__(self, client: Any, **kwargs: Any) -> None:
        options.check(client.transport_options)
        self._refuse_other_transports(client)
        super().__init__(client, **kwargs)
        self.cycle = Poller()
        self._background: Any = None
        self._pid = os.getpid()
        self._server_is_checked = False

    def _refuse_other_transports(self, client: Any) -> None:
        """An alternate's scheme decides what it is dialled with, and lists have other keys."""
        for url in client.alt or ():
            scheme = url_to_parts(url).scheme if "://" in url else ""
            scheme = scheme.partition("+")[0]
            found = get_transport_cls(scheme) if scheme else None
            if found is not None and not issubclass(found, Transport):
                raise AlternateError(
                    f"failing over to {scheme}:// would leave this transport for "
                    f"{found.__module__}, which has other keys and would not see these messages; "
                    f"write every URL with "
                    f"redis-streams://, rediss-streams:// or sentinel-streams://"
                )

    def check_server_once(self, channel: Any) -> None:
        if not self._server_is_checked:
            channel.check_server()
            self._server_is_checked = True

    def background_client(self, channel: Any) -> Any:
        """One for all channels, for the thread that renews their leases."""
        if self._background is None:
            self._background = channel.background_client()
        return self._background

    def begin_anew_in_child(self) -> None:
        """After a fork; once, although every channel asks for it."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._background = None
            self.cycle = Poller()

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        if self._background is not None:
            close_idle(self._background.connection_pool)  # it connects again if an ack comes late

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self.cycle.use(loop)
        super().register_with_event_loop(connection, loop)
        if not hasattr(lists.MultiChannelPoller, "maybe_check_brpop_health"):
            every = connection.client.transport_options.get(
                "health_check_interval", lists.DEFAULT_HEALTH_CHECK_INTERVAL
            )
            if every:
                loop.call_repeatedly(every, self.cycle.check_reads)
