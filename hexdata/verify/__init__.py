"""Proof that a store holds what it says, and that its sources can be had back. Only reads."""

from hexdata.verify.contents import Check, VerifyResult, verify_store
from hexdata.verify.options import VerifyOptions
from hexdata.verify.roundtrip import RoundTrip, check_round_trip

__all__ = ["Check", "RoundTrip", "VerifyOptions", "VerifyResult", "check_round_trip", "verify_store"]
