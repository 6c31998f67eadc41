"""Upserts: the rows of a frame or a stream into a table with a key, each micro-batch once."""
