"""Verification of a store against its manifest, and of its sources against the original files. Read-only."""

from hexdata.verify.options import VerifyOptions
from hexdata.verify.roundtrip import RoundTrip, check_round_trip
from hexdata.verify.store import Check, VerifyResult, verify_store

__all__ = ["Check", "RoundTrip", "VerifyOptions", "VerifyResult", "check_round_trip", "verify_store"]
