"""One decoding step for a batch: draft, run the target, verify; by the host's loop or by the device's.

Where the state lies on the device, the host queues steps and reads them one step behind.
"""
