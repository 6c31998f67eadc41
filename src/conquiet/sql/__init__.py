"""Transaction, inbox, outbox and relay source on PostgreSQL and SQLite."""
