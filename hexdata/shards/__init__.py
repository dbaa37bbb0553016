"""Shards: tar files of position blocks and their manifest.

``docs/format.md`` describes their bytes. Each module adds one step between a table of positions and the
arrays of a loader:

- ``blocks``: a block is a dict of arrays, one per field. The table ``FIELDS`` has the dtype, the range and
  the null of every field, from which the writer, the readers and the checks follow.
- ``block_check``: whether the values of a block, or of positions in a table, are valid.
- ``format``: ``ShardWriter`` and ``read_blocks`` convert blocks to the bytes of a tar file and back.
- ``manifest``: ``ShardManifest`` lists the shards: sizes, digests and the offsets of their blocks.
- ``sources``: ``ShardSource`` opens the files of a folder, an object store, a web server or a command, each
  as a ``ByteStream``.
- ``cache``: ``CachedSource`` is a source whose shards are copied to a local folder when first read.
- ``reader``: ``BlockReader`` reads blocks from a source, and compares all their bytes with the manifest.
"""
