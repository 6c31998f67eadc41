"""The reference application: a marketplace of stores that order from each other."""
