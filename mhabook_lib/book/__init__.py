"""Bookmaking: the claims ledger that chapters write, and the pipeline that runs, checks and builds.

Importing this package needs nothing beyond the core dependencies, so a chapter runs anywhere
the library does; the pipeline's modules import their own tools.
"""

from mhabook_lib.book.claims import ClaimError, Ledger, stable

__all__ = ["ClaimError", "Ledger", "stable"]
