"""The asynchronous training backend: gateway, engines, buffer, trainer. Imports no torch by itself."""
