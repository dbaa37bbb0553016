"""Tests of ``hexdata.loader.options`` and of the cache options."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from hexdata.errors import ConfigError
from hexdata.loader.options import CacheOptions, LoaderOptions


def test_defaults():
    options = LoaderOptions()
    assert (options.split, options.mode, options.remainder, options.check) == (
        "train",
        "exact",
        "short",
        "sizes",
    )
    assert LoaderOptions(batch_size=6, world_size=4, rank=3).global_batch == 24


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_integers_become_python_integers(kind):
    plain = {"batch_size": 6, "seed": 3, "world_size": 4, "rank": 2, "newest": 9, "window": 100}
    options = LoaderOptions(
        **{name: kind(value) for name, value in plain.items()}, streams=(kind(8), kind(2))
    )
    assert options == LoaderOptions(**plain, streams=(8, 2))
    assert json.loads(json.dumps(asdict(options)))["streams"] == [8, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size cannot be used; found 0; expected an integer, at least 1"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": np.True_}, "batch_size"),
        ({"batch_size": np.float64(8)}, "batch_size"),
        ({"seed": True}, "seed cannot be used"),
        ({"seed": None}, "seed cannot be used"),
        ({"shuffle": "no"}, "shuffle cannot be used; found 'no'; expected True or False"),
        ({"shuffle": 0}, "shuffle cannot be used"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 2, "rank": 2}, "rank must be below world_size; found 2; expected below 2"),
        ({"rank": -1}, "rank cannot be used"),
        ({"seed": "7"}, "seed cannot be used; found '7'"),
        ({"mode": "exakt"}, "unknown mode; found 'exakt'; expected 'games' or 'exact' or 'stream'"),
        ({"remainder": "keep"}, "unknown remainder; found 'keep'; expected 'short' or 'drop' or 'pad'"),
        ({"on_error": "warn"}, "unknown on_error"),
        ({"check": "all"}, "unknown check"),
        ({"where": " "}, "where cannot be used; found ' '"),
        ({"where": 7}, "where cannot be used"),
        ({"newest": 0}, "newest cannot be used; found 0"),
        ({"window": 0}, "window cannot be used"),
        ({"streams": 4}, "streams cannot be used; found 4; expected a pair"),
        ({"streams": (4, 0)}, "streams cannot be used; found 0"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LoaderOptions(**options)


def test_a_cache_size_may_have_a_unit():
    assert CacheOptions(cache_size="1.5GB").cache_size == CacheOptions(cache_size=1_500_000_000).cache_size
    assert CacheOptions(np.str_("copies"), prefetch=np.int64(3)) == CacheOptions("copies", prefetch=3)
    assert LoaderOptions().copies == CacheOptions(True, 50_000_000_000, None)


def test_a_cache_folder_may_be_a_file_url():
    assert CacheOptions("file:///ssd/copies") == CacheOptions("/ssd/copies")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": 7}, "cache cannot be used; found 7; expected a folder or None"),
        ({"cache": ""}, "cache cannot be used"),
        ({"cache": "memory://copies"}, "a cache of shards can only be on this machine; found memory:"),
        ({"cache": "ftp://host/copies"}, "a cache of shards can only be on this machine; found ftp://"),
        ({"cache_size": 0}, "cache_size cannot be used; found 0; expected an integer, at least 1"),
        ({"cache_size": "much"}, "cache_size cannot be used; found 'much'; expected a number and a unit"),
        ({"cache_size": 1e9}, "cache_size cannot be used"),
        ({"prefetch": -1}, "prefetch cannot be used; found -1"),
        ({"prefetch": True}, "prefetch cannot be used"),
    ],
)
def test_invalid_cache_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CacheOptions(**options)
