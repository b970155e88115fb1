"""Numerics shared by all chapters."""
