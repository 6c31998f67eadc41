"""Benchmarks; each runs as `python bench/core.py` and as `python -m bench.core`, with `--help`.

Python puts the directory of a script first on its path, where `queue.py` and `redis.py` would be
taken for the libraries of these names. So every script begins with the line that puts the checkout
in the place of `bench/`, before it imports anything else.
"""
