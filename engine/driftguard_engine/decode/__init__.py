"""One decoding step for a batch: draft, run the target, verify.

On a GPU the host queues a step before it reads the outcome of the one before.
"""
