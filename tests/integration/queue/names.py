"""The stream and the group of all these tests."""

STREAM, GROUP = "orders", "billing"
