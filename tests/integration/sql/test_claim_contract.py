"""The contract of a source, over the source of a relay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conquiet.sql import Outbox, OutboxSource, Transaction, schema
from conquiet.sql import engine as make_engine
from conquiet.testing.contracts import SourceContract


class OverOutbox(SourceContract):
    lease = None
    ordered = False
    keeps_place = False

    @pytest.fixture(autouse=True)
    def _short_rests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("conquiet.sql.claim._FIRST_DELAY_SECONDS", 0.1)

    def open(self, lease: float) -> OutboxSource:
        return OutboxSource(self.engine, poll=0.02, ordered=self.ordered)

    def publish(self, messages) -> None:
        with Transaction(self.engine).scope(messages):
            Outbox("orders").store(messages)

    def crash(self, source: OutboxSource) -> None:
        source._closed = True
        for claim in source._claims:
            connection = claim._opened.connection
            if connection is not None:
                connection.connection.driver_connection.close()
        if hasattr(source._claimer, "_relay_lock"):
            source._claimer._relay_lock.release()

    @pytest.mark.parametrize("acked", [0, 6])
    def test_acking_k_of_n_and_crashing_returns_the_other_n_minus_k(self, acked: int) -> None:
        """Not for some of them: a claim is one transaction, and a crash undoes its marks."""
        super().test_acking_k_of_n_and_crashing_returns_the_other_n_minus_k(acked)

    def test_any_sequence_of_settlements_loses_nothing_and_repeats_nothing(self) -> None:
        pytest.skip("what is nacked returns when its whole claim is settled")


class OverSqlite(OverOutbox):
    @pytest.fixture(autouse=True)
    def _database(self, sqlite_url) -> Iterator[None]:
        self.engine = make_engine(sqlite_url)
        schema.init(self.engine)
        yield
        self.engine.dispose()


class OverPostgresql(OverOutbox):
    @pytest.fixture(autouse=True)
    def _database(self, database_url) -> Iterator[None]:
        self.engine = make_engine(database_url, pool_size=20)
        schema.init(self.engine)
        yield
        self.engine.dispose()


class TestSqlite(OverSqlite):
    pass


class TestSqliteOrdered(OverSqlite):
    ordered = True
    keeps_place = True


class TestPostgresql(OverPostgresql):
    pass


class TestPostgresqlOrdered(OverPostgresql):
    ordered = True
    keeps_place = True
