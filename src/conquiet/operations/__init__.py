"""Operations: inspect and repair streams, dead letters and running processes, trace an event.

    from conquiet.operations import dead_letters, history, presence, streams, trace

Plain functions that print nothing; the command line and the dashboard use them. Each module imports
the packages that it needs: a file of dead letters is read without redis-py.
"""

__all__ = ["dead_letters", "history", "presence", "streams", "trace"]
