"""Shards: tar files of position blocks, their manifest, and the places they are read from."""
