"""mhabook_lib: the small library behind the book on multi-head attention."""

__version__ = "0.1.0"
