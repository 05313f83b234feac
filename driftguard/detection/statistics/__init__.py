"""The statistics of the detector; nothing here knows a stream."""
