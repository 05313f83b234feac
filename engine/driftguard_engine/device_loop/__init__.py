"""Decoding whose state lies on the device: the host queues steps and reads them one step behind."""
