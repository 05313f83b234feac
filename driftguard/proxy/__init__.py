"""`driftguard proxy`: passes requests on to a serving engine and makes records of the counts in its
answers."""
