"""One decoding step for a batch: draft, run the target, verify; by the host's loop or by the device's.

In the device's loop the host queues a step before it reads the outcome of the one before.
"""
