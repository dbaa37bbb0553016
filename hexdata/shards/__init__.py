"""Shards: tar files of position blocks and their manifest.

``format`` and ``tar_members`` write and read shards strictly, ``blocks`` holds their arrays. ``locate`` finds
the source of a user's shards, ``reader`` reads a split sequentially, and ``mapped`` at random.
"""
