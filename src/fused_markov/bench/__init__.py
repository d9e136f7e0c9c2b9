"""Timing and checking of engines against the reference loop."""
