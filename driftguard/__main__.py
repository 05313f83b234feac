"""`python -m driftguard` is the command line."""

from driftguard.cli import main

main()
