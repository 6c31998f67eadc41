"""The URL of a sink: settings are taken out of its query one by one."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from conquiet.errors import ConfigError


def trouble(error: BaseException, url: str) -> str:
    """What is wrong with a URL; the words of a library may quote a part of its password."""
    if "@" in url and isinstance(error, ValueError):
        return "it cannot be understood; percent-encode what is special in its password"
    return str(error)


class Url:
    """A URL such as `kafka://host:9092/orders?timeout=5`."""

    def __init__(self, text: str) -> None:
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise ConfigError(f"the URL of the sink: {trouble(error, text)}") from None
        self.place = parts.netloc
        self.path = unquote(parts.path.strip("/"))
        self._base = text.partition("?")[0]
        self._query = dict(parse_qsl(parts.query, keep_blank_values=True))

    @property
    def rest(self) -> str:
        """The URL without what was taken out of it."""
        return f"{self._base}?{urlencode(self._query)}" if self._query else self._base

    def seconds(self, default: float) -> float:
        text = self._query.pop("timeout", str(default))
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"timeout={text!r:.40}: must be a number of seconds") from None

    def flag(self, name: str, default: bool) -> bool:
        text = self._query.pop(name, "true" if default else "false")
        if text not in ("true", "false"):
            raise ConfigError(f"{name}={text!r:.40}: choose true or false")
        return text == "true"

    def names(self, name: str) -> list[str]:
        return [each for each in self._query.pop(name, "").split(",") if each]

    def others(self) -> dict[str, str]:
        taken, self._query = self._query, {}
        return taken

    def end(self) -> None:
        for name in self._query:
            raise ConfigError(f"the URL of the sink has a setting {name!r:.60} that nobody knows")
