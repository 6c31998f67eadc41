"""conquiet: effects exactly once, events never lost."""
