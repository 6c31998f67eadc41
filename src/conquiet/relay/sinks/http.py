"""Publish CloudEvents over HTTP in binary mode, one request per message.

2xx                                   confirmed
408 425 429 502 503 504               the receiver is busy: an outage, which costs no attempt
3xx 401 403 404 405 407 410           wrong address or credentials: an outage likewise
other 4xx                             the receiver will never accept this message: `Rejected`
other 5xx                             the receiver failed at this message: `Refused`
an answer that cannot be read, or     likewise
does not end within the timeout
"""

from __future__ import annotations

import http.client
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast
from urllib.parse import quote, unquote, urlsplit

from conquiet.acking import Error
from conquiet.config import check_timeout, explain
from conquiet.errors import ConfigError, PermanentError, Refused, SinkUnavailable
from conquiet.exchange import ExchangeSocket, TooMuchReceived, connect, open_http
from conquiet.message import Message, describe
from conquiet.relay.sinks.answers import Answers, not_tried
from conquiet.relay.sinks.envelope import Envelope
from conquiet.sink import Sink

_BUSY = frozenset((408, 425, 429, 502, 503, 504))
_WRONG_ADDRESS = frozenset((401, 403, 404, 405, 407, 410))
_MAX_PAUSE_SECONDS = 60.0
_MAX_TIMEOUTS = 2
_MAX_ANSWER_BYTES = 64 * 1024
_MAX_RECEIVED_BYTES = 512 * 1024
"""Of one answer with its headers and any number of interim replies (100 Continue) before it."""
# CloudEvents' HTTP binding: printable ASCII is not quoted, except space, " and %.
_UNQUOTED = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class Rejected(PermanentError):
    """The receiver will never accept this message."""


class _Pause(SinkUnavailable):
    """The receiver asked for a pause, by its status or Retry-After."""


class _Silent(SinkUnavailable):
    """The receiver accepted the request and did not answer in time."""


class HttpSink(Sink):
    """Posts each message to one URL.

    The topic of a message is sent as the header `ce-topic`. Requests of one batch are sent one
    after the other, on one connection. `timeout` seconds are the time for connecting, sending and
    the whole answer of one message; messages that are not begun within `timeout` seconds are given
    back. A certificate that cannot be verified is an outage; `context` is for private
    certificate authorities.

    `url` gets all messages, with `headers` in each request; `topic` is the default for messages
    without one.
    """

    def __init__(
        self,
        url: str,
        topic: str | None = None,
        *,
        timeout: float = 10.0,
        headers: Mapping[str, str] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        try:
            parts = urlsplit(url)
            self._host = parts.hostname or ""
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"the URL of an HTTP sink: {explain(error, url)}") from None
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError("the URL of an HTTP sink must look like https://host/path")
        if parts.username or parts.password:
            raise ConfigError(
                "the URL of an HttpSink must not contain a password, which proxies log; give"
                " headers={'authorization': …}, or use HttpSink.from_url"
            )
        self._place = parts.netloc
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._topic = topic
        self._timeout = check_timeout(timeout)
        self._headers = dict(headers or {})
        for name, value in self._headers.items():
            if not (name + value).isascii() or not (name + value).isprintable():
                raise ConfigError(f"the header {name!r:.60} of an HTTP sink: printable ASCII only")
        self._context = context
        if parts.scheme == "https" and context is None:
            self._context = ssl.create_default_context()
        self._connection: http.client.HTTPConnection | None = None
        self._paused_until = 0.0

    @classmethod
    def from_url(cls, url: str, topic: str | None = None, timeout: float = 10.0) -> Self:
        """Create a sink from a URL; its query belongs to the receiver.

        `https://USER:PASSWORD@host/` authenticates by Basic, `https://TOKEN@host/` by Bearer; both
        are sent in a header, never in the address.
        """
        plain, credentials = _credentials(url)
        return cls(plain, topic, timeout=timeout, headers=credentials)

    def publish_each(self, messages: Sequence[Message[Any]]) -> Sequence[Error]:
        """Return one answer per message; raise `SinkUnavailable` if none was answered."""
        answers = Answers(messages, self._timeout)
        silent: list[int] = []
        stopped: SinkUnavailable | None = None
        for place, envelope in answers.pack_all(lambda message, envelope: None):
            message = messages[place]
            if stopped is not None:
                answers.set(place, SinkUnavailable(f"{_name(message)}: not tried: {stopped}"))
                continue
            if answers.are_late and not silent:  # after a timeout, one more finds who is at fault
                answers.set(place, not_tried())
                continue
            answer = self._answer(message, envelope)
            answers.set(place, answer)
            if not isinstance(answer, SinkUnavailable):
                # The receiver hung at earlier messages and answered this one: they are at fault.
                for earlier in silent:
                    answers.set(earlier, Refused(f"{_name(messages[earlier])}: no answer in time"))
                silent.clear()
            elif isinstance(answer, _Silent):
                silent.append(place)
                stopped = answer if len(silent) >= _MAX_TIMEOUTS else None
            else:
                stopped = answer
        return answers.conclude()

    def check(self) -> None:
        """Raise `SinkUnavailable` if the receiver cannot be reached."""
        try:
            connect(self._host, self._port, self._timeout, self._context).close()
        except OSError as error:
            raise SinkUnavailable(f"{self._place} cannot be reached: {error}") from error

    def close(self) -> None:
        """Close the connection; the next message opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _answer(self, message: Message[Any], envelope: Envelope) -> Error:
        left = self._paused_until - time.monotonic()
        if left > 0:
            return _Pause(f"{self._place} asked for a pause of {left:.0f} s more")
        try:
            return self._post(message, envelope)
        except TimeoutError as error:
            self.close()
            return _Silent(f"{_name(message)}: {self._place} did not answer in time: {error}")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return SinkUnavailable(f"{self._place} cannot be reached: {error!r:.200}")

    def _post(self, message: Message[Any], envelope: Envelope) -> Error:
        headers = self._all_headers(message, envelope)
        until = time.monotonic() + self._timeout
        if self._connection is not None:
            try:
                return self._exchange(message, envelope.body, headers, until)
            except (ConnectionError, http.client.BadStatusLine):
                self.close()  # the receiver may close an idle connection at any time
        try:
            self._connection = open_http(
                *(self._host, self._port, _left(until), self._context),
                max_bytes=_MAX_RECEIVED_BYTES,
            )
        except OSError as error:
            return SinkUnavailable(f"{self._place} cannot be reached: {error!r:.200}")
        try:
            return self._exchange(message, envelope.body, headers, until)
        except (ConnectionError, http.client.BadStatusLine) as error:
            self.close()
            return Refused(f"{_name(message)}: {self._place} closed the connection: {error!r:.200}")

    def _exchange(
        self, message: Message[Any], body: bytes, headers: dict[str, str], until: float
    ) -> Error:
        connection = self._connection
        assert connection is not None
        exchange = cast("ExchangeSocket", connection.sock)
        exchange.begin(_left(until))
        connection.request("POST", self._path, body, headers)
        try:
            response = connection.getresponse()
            text = response.read(_MAX_ANSWER_BYTES)
            has_more = bool(response.read(1))
        except (ConnectionError, http.client.BadStatusLine):
            raise
        except TimeoutError:
            if not exchange.received:
                raise
            self.close()
            why = f"began to answer, and did not end within {self._timeout:g} s"
            return Refused(f"{_name(message)}: {self._place} {why}")
        except (TooMuchReceived, http.client.HTTPException) as error:
            self.close()
            why = f"its answer cannot be read: {error!r:.200}"
            return Refused(f"{_name(message)}: {self._place}: {why}")
        if has_more or response.will_close:
            self.close()
        return self._judge(message, response, text)

    def _all_headers(self, message: Message[Any], envelope: Envelope) -> dict[str, str]:
        headers = {f"ce-{name}": _quote(text) for name, text in envelope.attributes.items()}
        # With hyphens: servers and proxies drop headers with an underscore in the name.
        for name, text in envelope.plain.items():
            headers[name.replace("_", "-")] = _quote(text)
        topic = message.topic or self._topic
        if topic:
            headers.setdefault("ce-topic", _quote(topic))
        if envelope.content_type is not None:
            headers["content-type"] = _printable(envelope.content_type)
        return {**headers, **self._headers}

    def _judge(
        self, message: Message[Any], response: http.client.HTTPResponse, text: bytes
    ) -> Error:
        status = response.status
        if 200 <= status < 300:
            return None
        answer = f"{status} {response.reason}: {text[:200].decode(errors='backslashreplace')}"
        if status in _BUSY:
            self._paused_until = time.monotonic() + _seconds(response.getheader("retry-after"))
            return _Pause(f"{self._place} is busy: {answer}")
        if status < 400 or status in _WRONG_ADDRESS:
            return SinkUnavailable(
                f"{self._place} accepts nothing at this address: {answer}; correct the URL or the"
                " headers"
            )
        kind = Rejected if status < 500 else Refused
        return kind(f"{_name(message)}: {self._place} answered {answer}")


def _credentials(url: str) -> tuple[str, dict[str, str]]:
    """Split a URL into one without user and password, and the header that carries them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url, {}  # the constructor refuses it
    given, at, place = parts.netloc.rpartition("@")
    if not at or not given:
        return url, {}
    user, colon, password = given.partition(":")
    if colon:
        pair = f"{unquote(user)}:{unquote(password)}".encode()
        header = f"Basic {b64encode(pair).decode()}"
    else:
        header = f"Bearer {unquote(user)}"
    return parts._replace(netloc=place).geturl(), {"authorization": header}


def _left(until: float) -> float:
    """Return the seconds until a deadline; a moment at least, since a timeout of 0 is none."""
    return max(0.001, until - time.monotonic())


def _name(message: Message[Any]) -> str:
    return describe(message.attributes)


def _quote(text: str) -> str:
    return quote(text, safe=_UNQUOTED)


def _printable(text: str) -> str:
    return quote(text, safe=_UNQUOTED + ' "%')


def _seconds(retry_after: str | None) -> float:
    """Parse Retry-After in seconds; for a date, the relay's own backoff applies."""
    if retry_after is None or not retry_after.strip().isdecimal():
        return 0.0
    return min(float(retry_after), _MAX_PAUSE_SECONDS)
