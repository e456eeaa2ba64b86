"""Checkpoint storage behind one small protocol."""
