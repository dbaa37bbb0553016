"""Addresses that contain a secret, in every form that hexdata or a library of it accepts or refuses."""

from __future__ import annotations

from typing import Final

__all__ = ["ADDRESSES", "SECRET", "is_hidden"]

SECRET: Final = "geheim-7331"
_ENCODED: Final = "geheim%2D7331"

ADDRESSES: Final = {
    "user of a web server": f"http://me:{SECRET}@127.0.0.1:9/shards",
    "name without password": f"http://{SECRET}@127.0.0.1:9/shards",
    "password with a slash": f"http://me:a/{SECRET}@127.0.0.1:9/shards",
    "encoded password": f"https://me:{_ENCODED}@127.0.0.1:9/shards",
    "token": f"http://127.0.0.1:9/shards?token={SECRET}",
    "signature among others": f"http://127.0.0.1:9/shards?x=1&X-Amz-Signature={SECRET}&y=2",
    "query without a name": f"http://127.0.0.1:9/shards?{SECRET}",
    "query after the name": f"https://127.0.0.1:9/{{name}}?sig={SECRET}",
    "query with a space": f"http://127.0.0.1:9/{{name}}?sig=a {SECRET}",
    "fragment": f"http://127.0.0.1:9/shards#token={SECRET}",
    "port that is none": f"http://127.0.0.1:{SECRET}@x/shards",
    "bracket that is not closed": f"http://me:{SECRET}@[x/shards",
    "user of S3": f"s3://me:{SECRET}@bucket/store",
    "encoded user of S3": f"s3://me%3A{SECRET}%40bucket/store",
    "parameter of S3": f"s3://bucket/store?secret={SECRET}",
    "parameter of Google": f"gs://bucket/store?key={SECRET}",
    "parameter of Azure": f"az://bucket/store?sv=1&sig={SECRET}",
    "user of Azure": f"abfss://bucket:{SECRET}@account.dfs.core.windows.net/store",
    "unknown protocol": f"ftp://me:{SECRET}@127.0.0.1:9/{{name}}",
    "file of another machine": f"file://me:{SECRET}@host/store",
    "header of a command": f"pipe:false -H 'Authorization: Bearer {SECRET}' http://127.0.0.1:9/{{name}}",
    "URL of a command": f"pipe:false http://u:{SECRET}@127.0.0.1:9/{{name}}?k={SECRET}",
    "option of a command": f"pipe:false --password {SECRET} {{name}}",
    "environment of a command": f"pipe:TOKEN={SECRET} false {{name}}",
    "command without a name": f"pipe:false {SECRET}",
    "command in capitals": f"PIPE:false {SECRET} {{name}}",
}
"""Addresses by what contains the secret. Nothing answers at any of them."""


def is_hidden(text: str) -> bool:
    """Return whether a text contains the secret in no spelling."""
    return SECRET not in text and _ENCODED not in text and SECRET.partition("-")[0] not in text
