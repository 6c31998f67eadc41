"""The right answer of every table, from the generator's own state; shares no code with Spark."""

from marketplace.oracle.oracle import Oracle
from marketplace.oracle.tables import TABLES, Table

__all__ = ["TABLES", "Oracle", "Table"]
