"""The types of the JSON documents in the database.

`driftguard.store.column_types` decodes a document where its row is read and encodes it where its row is
written, so that no other code reads a key of it. A member that is None is not stored; one that an earlier
version did not write has a default. Pure: no database.
"""
