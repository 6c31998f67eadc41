"""Settings of the dashboard, and the command that serves it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from conquiet.cli import main
from conquiet.errors import ConfigError
from conquiet.web import Basic, Header, Open, Token
from conquiet.web.settings import SETTINGS, access_of, load
from tests import zygote

TOKEN = "a-token-that-is-long-enough"


def test_the_defaults_are_safe() -> None:
    settings = load(environ={})
    assert (settings.host, settings.port, settings.auth) == ("127.0.0.1", 8082, "token")
    assert (settings.database, settings.broker) == ("", "redis://localhost:6379/0")
    assert (settings.read_only, settings.hide_payloads) == (False, False)
    access, is_new = access_of(settings)
    assert isinstance(access, Token)
    assert is_new
    assert len(access.token) > 40


def test_a_flag_beats_a_variable_and_the_relays_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('[relay]\ndatabase = "sqlite:///shop.db"\ntable = "sales.outbox"\n')
    environ = {
        "CONQUIET_CONFIG": str(file),
        "CONQUIET_DASHBOARD_PORT": "1",
        "CONQUIET_DASHBOARD_READ_ONLY": "true",
        "CONQUIET_DASHBOARD_RELAYS": "http://a:8081, http://b:8081",
        "CONQUIET_DASHBOARD_HOST": "",
    }
    settings = load({"port": "2"}, environ)
    assert (settings.port, settings.read_only, settings.host) == (2, True, "127.0.0.1")
    assert settings.relays == ("http://a:8081", "http://b:8081")
    assert (settings.database, settings.table) == ("sqlite:///shop.db", "sales.outbox")
    assert load({"broker": "off"}, {}).broker == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "99999"),
        ("port", "http"),
        ("broker", "localhost"),
        ("database", "mysql://h/d"),
        ("auth", "password"),
        ("read_only", "maybe"),
        ("relays", "relay:8081"),
        ("table", "x y"),
    ],
)
def test_a_wrong_value_names_the_setting_and_what_is_allowed(name: str, value: str) -> None:
    [setting] = [one for one in SETTINGS if one.name == name]
    for flags, environ in (({name: value}, {}), ({}, {setting.variable: value})):
        with pytest.raises(ConfigError, match=re.escape(setting.allowed)) as error:
            load(flags, environ)
        assert setting.flag in str(error.value) or setting.variable in str(error.value)


def test_ways_to_let_people_in(tmp_path: Path) -> None:
    def access(secret: str = "", **flags: str) -> object:
        made, is_new = access_of(load(flags, {"CONQUIET_DASHBOARD_TOKEN": secret}))
        assert not is_new
        return made

    assert access(TOKEN) == Token(TOKEN)
    assert access("ann:correct horse", auth="basic") == Basic("ann", "correct horse")
    assert isinstance(access(auth="none"), Open)
    made = access(auth="header", auth_header="X-User", proxies="10.0.0.0/8")
    assert isinstance(made, Header)
    assert (made.name, made.proxies) == ("X-User", ("10.0.0.0/8",))
    file = tmp_path / "token"
    first = access(token_file=str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert access(token_file=str(file)) == first
    file.write_text("ann:correct horse\n")
    assert access(auth="basic", token_file=str(file)) == Basic("ann", "correct horse")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"auth": "none", "host": "0.0.0.0"}, "--no-auth with --host 0.0.0.0"),
        ({"auth": "none", "host": "::"}, "--no-auth"),
        ({"auth": "basic"}, "USER:PASSWORD"),
        ({"auth": "basic", "token_file": "/nowhere/x"}, "/nowhere/x: No such file"),
        ({"token_file": "/nowhere/x"}, "/nowhere/x: No such file"),
        ({"token_file": os.devnull}, "16 printable characters"),
    ],
)
def test_what_would_let_in_anybody_or_nobody_is_refused(flags: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        access_of(load(flags, {}))


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["dashboard", "--broker", "off", "--no-auth", "--port", port]) == 2
    assert f"127.0.0.1:{port} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_the_command_serves_until_a_signal_even_with_a_page_open(shop, kind) -> None:
    command = [sys.executable, "-m", "conquiet", "dashboard", "--port", "0", "--json"]
    stores = ["--broker", shop.redis, "--database", shop.database]
    run = zygote.Popen(
        [*command, *stores], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said = json.loads(run.stdout.readline())
        with httpx.Client(follow_redirects=True, timeout=10) as client:
            assert client.get(said["url"], headers={"accept": "*/*"}).status_code == 401
            client.get(said["enter"])
            assert "Nothing needs attention" in client.get(said["url"]).text
            with client.stream("GET", f"{said['url']}live/overview") as live:
                assert next(live.iter_lines()).startswith("data: ")
                run.send_signal(kind)
                assert run.wait(10) == 0
        errors = run.stderr.read()
        assert "Traceback" not in errors
        assert said["enter"].partition("token=")[2] not in errors
    finally:
        run.kill()
        run.communicate()


def test_settings_are_printed_without_secrets(monkeypatch, capsys) -> None:
    monkeypatch.setenv("CONQUIET_DASHBOARD_TOKEN", TOKEN)
    arguments = ["dashboard", "--print-settings", "--broker", "redis://:hunter2@h/0", "--read-only"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "CONQUIET_DASHBOARD_READ_ONLY     = true" in told
    assert "hunter2" not in told
    assert TOKEN not in told
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["CONQUIET_BROKER_URL"] == "redis://:***@h/0"


def test_the_token_is_told_unless_somebody_set_it(capsys: pytest.CaptureFixture[str]) -> None:
    from conquiet.cli.dashboard import _print_address

    settings = load({}, {})
    _print_address(settings, 8082, "made-here", [("Redis", "redis://h")], False)
    assert "http://127.0.0.1:8082/login?token=made-here" in capsys.readouterr().out
    _print_address(settings, 8082, "", [], False)
    told = capsys.readouterr().out
    assert "http://127.0.0.1:8082/\n" in told
    assert "sign in by the token that was set" in told
    _print_address(load({"public_url": "https://ops.example.com/c/"}, {}), 8082, "t", [], False)
    assert "https://ops.example.com/c/login?token=t" in capsys.readouterr().out
