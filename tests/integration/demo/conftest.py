"""A browser for the report: the one of the dashboard's tests."""

from tests.web.conftest import chromium

__all__ = ["chromium"]
