"""The kinds of drafts that are trained and scored, behind one interface."""
