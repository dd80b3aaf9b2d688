"""The Hugging Face hub, asked only where it answers: its clients try for half a minute to find out that it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["hub_answers", "hub_or_cache"]

_PROBE_S = 3.0
_switching = threading.RLock()  # `datasets` has one switch for the process: each puts it back as it found it


def hub_answers() -> bool:
    """Whether the hub, or what HF_ENDPOINT names, answers; asked by its own client, so through the same proxies."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_PROBE_S)
    except Exception:  # of the HTTP library under it, or that HF_HUB_OFFLINE is set; each means the same here
        return False
    return True


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """For calls of `datasets`: where the hub does not answer, they look for what it gave before, and nowhere else.

    Raises:
        ConnectionError: it does not answer, and did not give that before.
    """
    if hub_answers():
        yield
        return
    import datasets
    from huggingface_hub import constants

    with _switching:
        before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
        try:
            yield
        except Exception as error:  # it raises many kinds
            raise ConnectionError(f"{constants.ENDPOINT} does not answer, and it is not in the cache") from error
        finally:
            datasets.config.HF_HUB_OFFLINE = before
