"""The demo: the whole path of an event, with a crash in the middle, and the verdict on it.

    world ─▶ sending ─▶ handling ─▶ publishing ─▶ tabling ─▶ audit, lake ─▶ verdict ─▶ report

`running` runs it. Nothing is imported here: each process of the demo imports what it needs.
"""
