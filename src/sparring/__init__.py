"""Gymnasium environments where language-model agents work over many turns, and a backend that trains them."""
