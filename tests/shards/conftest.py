"""Fixtures that write folders of small synthetic shards."""

from tests.shard_folder import make_shards, shards

__all__ = ["make_shards", "shards"]
