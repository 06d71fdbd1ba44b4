"""Searched layer masks, shipped as package data and found by pair name."""
