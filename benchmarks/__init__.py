"""Ours against the peer or naive way, both in one process."""
