"""`driftguard proxy`: passes requests on to a serving engine and records what their answers tell."""
