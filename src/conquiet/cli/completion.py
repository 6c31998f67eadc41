"""`conquiet completion bash|zsh|fish`: what Tab offers, made from the parser itself."""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from conquiet.cli.terminal import OK, print_json

_EPILOG = """\
examples:
  source <(conquiet completion bash)                  now; in ~/.bashrc, always
  conquiet completion zsh > ~/.zfunc/_conquiet        a directory of $fpath
  conquiet completion fish > ~/.config/fish/completions/conquiet.fish

exit codes: 0 printed, 2 wrong usage
"""


def register(commands: Any, common: ArgumentParser) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the script that lets Tab complete commands and options",
        description="Print the script that lets Tab complete the commands and options of conquiet.",
        epilog=_EPILOG,
        parents=[common],
    )
    parser.add_argument("shell", choices=tuple(_SHELLS), help="for which shell")
    parser.add_argument("--json", action="store_true", help="the commands and options, as JSON")
    parser.set_defaults(run=_run)


class Place(NamedTuple):
    """A position in a command line, and the words that may come next."""

    path: tuple[str, ...]
    commands: dict[str, str]
    """Names and what they do."""
    options: dict[str, str]
    choices: dict[str, tuple[str, ...]]
    """Of options that take one of a few words."""
    valued: tuple[str, ...]
    """Options that are followed by a value."""
    words: tuple[str, ...]
    """Return the choices of positional arguments."""


def places(parser: ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Place]:
    """Return the parser and all below it."""
    groups = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    flags = [action for action in parser._actions if action.option_strings]
    shown = [action for action in flags if action.help != SUPPRESS]
    yield Place(
        path,
        {item.dest: item.help or "" for group in groups for item in group._choices_actions},
        {name: _plain(action) for action in shown for name in action.option_strings},
        {
            name: tuple(map(str, action.choices))
            for action in shown
            if action.choices
            for name in action.option_strings
        },
        tuple(name for action in shown if action.nargs != 0 for name in action.option_strings),
        tuple(
            str(word)
            for action in parser._actions
            if not action.option_strings and action not in groups
            for word in action.choices or ()
        ),
    )
    for group in groups:
        for name, child in group.choices.items():
            yield from places(child, (*path, name))


def _plain(action: Action) -> str:
    return (action.help or "").replace("%%", "%")


def _run(options: Namespace) -> int:
    from conquiet.cli import build_parser

    found = list(places(build_parser()))
    if options.json:
        print_json([place._asdict() for place in found])
    else:
        print(_SHELLS[options.shell](found))
    return OK


# --- bash and zsh: a function that finds its place by the words before the cursor --------------

_BASH = """\
# Tab for conquiet in bash; made by: conquiet completion bash
_conquiet() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} place="" words="" index
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "$place ${{COMP_WORDS[index]}}" in
{steps}
        esac
    done
    case "$place ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
    esac
    case "$place" in
{words}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _conquiet conquiet"""

_ZSH = """\
#compdef conquiet
# Tab for conquiet in zsh; made by: conquiet completion zsh
_conquiet() {{
    local place="" index
    local -a offered
    for ((index = 2; index < CURRENT; index++)); do
        case "$place $words[index]" in
{steps}
        esac
    done
    case "$place $words[CURRENT-1]" in
{values}
    esac
    case "$place" in
{words}
    esac
    _describe 'conquiet' offered || _files
}}
compdef _conquiet conquiet"""


def _bash(found: list[Place]) -> str:
    def value(some: tuple[str, ...]) -> str:
        if not some:  # whatever it is; bash offers files
            return "COMPREPLY=(); return ;;"
        return f'COMPREPLY=($(compgen -W "{" ".join(some)}" -- "$current")); return ;;'

    def words(place: Place) -> str:
        return f'words="{" ".join((*place.commands, *place.words, *place.options))}" ;;'

    return _cases(_BASH, found, value, words)


def _zsh(found: list[Place]) -> str:
    def value(some: tuple[str, ...]) -> str:
        return f"compadd {' '.join(some)}; return ;;" if some else "_files; return ;;"

    def words(place: Place) -> str:
        offered = {**place.commands, **dict.fromkeys(place.words, ""), **place.options}
        items = " ".join(_quote(f"{name}:{_escape(what)}") for name, what in offered.items())
        return f"offered=({items}) ;;"

    return _cases(_ZSH, found, value, words)


def _cases(
    script: str,
    found: list[Place],
    value: Callable[[tuple[str, ...]], str],
    words: Callable[[Place], str],
) -> str:
    """Build a script that distinguishes positions by the commands before them."""
    steps: list[str] = []
    values: list[str] = []
    ends: list[str] = []
    for place in found:
        at = "".join(f" {name}" for name in place.path)
        steps += [f'            "{at} {name}") place="{at} {name}" ;;' for name in place.commands]
        values += [
            f'        "{at} {option}") {value(place.choices.get(option, ()))}'
            for option in place.valued
        ]
        ends.append(f'        "{at}") {words(place)}')
    parts = {"steps": steps, "values": values, "words": ends}
    return script.format(**{name: "\n".join(lines) for name, lines in parts.items()})


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")


def _quote(text: str) -> str:
    """Quote a text for a shell, in single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish: a line for each word, with the words that must come before it ----------------------


def _fish(found: list[Place]) -> str:
    lines = [
        "# Tab for conquiet in fish; made by: conquiet completion fish",
        "function __conquiet_words",
        "    commandline -opc | string match -v -- '-*'",
        "end",
        "function __conquiet_at",
        "    set -l words (__conquiet_words)",
        '    string match -q -- "conquiet $argv *" "conquiet $words[2..-1] "',
        "end",
        "function __conquiet_here",
        "    set -l words (__conquiet_words)",
        '    test "conquiet $argv" = "conquiet $words[2..-1]"',
        "end",
    ]
    for place in found:
        at = " ".join(place.path)
        for name, what in {**place.commands, **dict.fromkeys(place.words, "")}.items():
            here = _quote_for_fish(f"__conquiet_here {at}".rstrip())
            lines.append(f"complete -c conquiet -f -n {here} -a {name} -d {_quote_for_fish(what)}")
        if place.commands:
            continue  # options of groups are --help alone, which fish offers by itself
        for option, what in place.options.items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            if option in place.choices:
                kind += f" -x -a {_quote_for_fish(' '.join(place.choices[option]))}"
            elif option in place.valued:
                kind += " -r"
            here = _quote_for_fish(f"__conquiet_at {at}")
            lines.append(f"complete -c conquiet -n {here} {kind} -d {_quote_for_fish(what)}")
    return "\n".join(lines)


def _quote_for_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
