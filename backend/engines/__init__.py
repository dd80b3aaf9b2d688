"""Engines sample tokens. `base` is their contract; each engine is a module of its own, since most need torch."""
