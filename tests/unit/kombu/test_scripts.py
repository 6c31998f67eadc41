"""The Lua lies beside the code, each file says its keys, and all of them are shipped."""

from __future__ import annotations

from importlib.resources import files

import pytest

from conquiet.kombu import scripts

FOUND = sorted(
    entry.name.removesuffix(".lua")
    for entry in files("conquiet.kombu").joinpath("scripts").iterdir()
    if entry.name.endswith(".lua")
)


def test_every_file_is_a_script_and_every_script_a_file():
    loaded = {name for name, value in vars(scripts).items() if isinstance(value, scripts.Script)}
    assert loaded == set(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_keys_and_arguments_are_explained_at_the_top(name):
    text = files("conquiet.kombu").joinpath("scripts", f"{name}.lua").read_text()
    head = text.partition("\n\n")[0]
    assert "-- KEYS[" in head
    assert "-- ARGV[" in head


def test_a_script_is_called_by_its_hash_or_sent_whole():
    by_hash = scripts.size.by_hash(["k"], ["a", 1])
    assert by_hash == ("EVALSHA", scripts.size.sha, 1, "k", "a", 1)
    assert scripts.size.whole(["k"], []) == ("EVAL", scripts.size.body, 1, "k")
