"""Reads the counts in answers to single requests: one file per family of engines.

Everything here is pure: the bytes of an answer, or of the events of a streamed one, in; counts out.
"""
