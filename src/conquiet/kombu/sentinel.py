"""Sentinel: the same transport, whose master is asked for."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis as lists
from kombu.utils.url import url_to_parts
from redis import Redis, sentinel

from conquiet.kombu.channel import Channel
from conquiet.kombu.connecting import close_idle
from conquiet.kombu.errors import OptionError
from conquiet.kombu.transport import Transport


class SentinelChannel(Channel, lists.SentinelChannel):  # type: ignore[misc]  # Kombu has no types
    """A channel to whichever server is the master."""

    from_transport_options = (
        *Channel.from_transport_options,
        "master_name",
        "min_other_sentinels",
        "sentinel_kwargs",
    )
    connection_class = lists.SentinelChannel.connection_class
    connection_class_ssl = lists.SentinelChannel.connection_class_ssl

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Any:
        name = getattr(self, "master_name", None)
        if not name:
            raise OptionError(
                "the transport option master_name is missing: which master of the sentinels is it?"
            )
        params = self._connparams(asynchronous)
        first = params.pop("host", None), params.pop("port", None)
        sentinels = sentinel.Sentinel(  # type: ignore[no-untyped-call]  # redis-py gives it none
            self._addresses() or [first],
            min_other_sentinels=getattr(self, "min_other_sentinels", 0),
            sentinel_kwargs=getattr(self, "sentinel_kwargs", None),
            **params,
        )
        manager = "_async_sentinel_manager" if asynchronous else "_sentinel_manager"
        setattr(self, manager, sentinels)
        own = {key: params[key] for key in ("username", "password") if key in params}
        return sentinels.master_for(  # type: ignore[no-untyped-call]  # nor this
            name, Redis, **own
        ).connection_pool

    def _disconnect_pools(self) -> None:
        """Kombu closes the way to the sentinels since 5.7, of the last pool that was made only."""
        pools = [pool for pool in (self._pool, self._async_pool) if pool is not None]
        super()._disconnect_pools()
        for pool in pools:
            close_idle(pool)

    def _addresses(self) -> list[tuple[str, int]]:
        """Of all sentinels in the URL; their scheme is ours, not Kombu's."""
        parts = [url_to_parts(url) for url in self.connection.client.alt or ()]
        return [
            (part.hostname, part.port or self.connection.default_port)
            for part in parts
            if part.scheme in ("sentinel", "sentinel-streams")
        ]


class SentinelTransport(Transport):
    """`sentinel-streams://host:26379;sentinel-streams://other:26379` with `master_name` set."""

    default_port = 26379
    Channel = SentinelChannel
