"""Adaptive Verification: how many drafted tokens go to a verifier, and which, by calibrated chances and measured costs."""
