"""What became of an EXEC: applied, applied in part, refused, fenced, or unknown.

EXEC ──▶ a list, no error in it      applied
   │ ──▶ a list with errors          applied in part: `PartialExecError` (R8)
   │ ──▶ nil                         fenced: a watched key changed, nothing applied (R2)
   │ ──▶ an error                    refused: nothing applied (R8)
   └ no reply                        unknown: `UnknownOutcome` (R9)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conquiet.errors import Blameless, ConquietError, PermanentError, StoreError
from conquiet.handler import NOTHING, Result
from conquiet.message import Message, describe
from conquiet.redis.queued import Queued
from conquiet.redis.wire import is_unwilling


class UnknownOutcome(Blameless):
    """The reply of EXEC was lost: it took effect or it did not. The inbox knows at the next
    delivery."""


class InProgress(Blameless):
    """Somebody else handles the message right now, or did until it died."""


class Fenced(Blameless):
    """A watched key changed before EXEC, so that nothing was written: a lease of the batch ran
    out, or data that was read has changed. Its messages run again, one by one."""


class ExecRefused(ConquietError):
    """Redis refused a command when it was queued, so that nothing was written."""


class PartialExecError(PermanentError):
    """Redis ran the transaction, and some of its commands failed while the others took effect.

    Trying again would repeat what took effect. `failed` names the commands and their errors.
    """

    def __init__(self, about: str, failed: Sequence[tuple[str, str]], total: int) -> None:
        what = "; ".join(f"{command}: {error}" for command, error in failed[:5])
        super().__init__(
            f"{about}: {len(failed)} of {total} commands of its transaction failed when Redis ran"
            f" it, and the others took effect; the inbox holds the message as done. {what}"
        )
        self.failed = tuple(failed)


class PartlyApplied(Exception):
    """Which commands failed, before it is said to whom they belong."""

    def __init__(self, failed: Sequence[tuple[Queued, Exception]], total: int) -> None:
        super().__init__(f"{len(failed)} of {total} commands failed")
        self.failed = failed
        self.total = total

    def results(self, batch: Sequence[Message[Any]]) -> list[Result]:
        """An error for each message with a failed command; for all, if one belongs to nobody."""
        errors: dict[int, list[tuple[str, str]]] = {}
        for queued, error in self.failed:
            for message in queued.messages or batch:
                errors.setdefault(id(message), []).append((str(queued), str(error)))
        results: list[Result] = []
        for message in batch:
            failed = errors.get(id(message))
            if failed:
                about = describe(message.attributes)
                results.append(PartialExecError(about, failed, self.total))
            else:
                results.append(NOTHING)
        return results


def refusal(
    commands: Iterable[Queued | None], queued: Iterable[Any], reply: Exception
) -> Exception:
    """Why Redis took nothing: the first command that it refused, if there is one."""
    for command, answer in zip(commands, queued, strict=False):
        if isinstance(answer, Exception):
            what = "a command of conquiet" if command is None else str(command)
            text = f"Redis refused {what}, and nothing was written: {answer}"
            is_ours = command is None or is_unwilling(answer)
            return StoreError(text) if is_ours else ExecRefused(text)
    return StoreError(f"Redis refused the transaction, and nothing was written: {reply}")


def with_held(
    results: Sequence[Result], batch: Sequence[Message[Any]], held: Mapping[int, Exception]
) -> Sequence[Result]:
    """The results, where those of messages that others hold say so."""
    if not held:
        return results
    return [held.get(id(message), result) for message, result in zip(batch, results, strict=True)]
