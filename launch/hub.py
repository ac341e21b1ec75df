"""Checks with one short request whether the Hub can be reached.

Without a network, huggingface_hub, transformers and datasets repeat each request several times, which takes
minutes for a few names. If the Hub cannot be reached, HF_HUB_OFFLINE is therefore set before these libraries
are imported: they then read only their caches, and fail at once if a name is not in the cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

HUB = "https://huggingface.co"
SECONDS = 10.0  # time limit of the request; huggingface_hub's own limit for the same request is 10 s too
DECIDED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def use_caches_without_the_hub(names: Collection[str], seconds: float = SECONDS) -> None:
    """Sets HF_HUB_OFFLINE if a run needs the Hub for ``names`` and the Hub cannot be reached.

    Does nothing on ranks other than the first of a node, since these send no requests to the Hub. Also does
    nothing if one of the variables DECIDED is set, even to 0, or if huggingface_hub is already imported.
    """
    decided = any(name in os.environ for name in DECIDED) or "huggingface_hub" in sys.modules
    if not names or decided or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    import httpx  # slow, and not needed by runs with local names

    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    try:
        httpx.head(endpoint, timeout=seconds)  # with the proxies and certificates of huggingface_hub
        return
    except (httpx.HTTPError, httpx.InvalidURL, ImportError) as error:  # ImportError: a SOCKS proxy
        reason = str(error) or type(error).__name__
    os.environ["HF_HUB_OFFLINE"] = "1"
    if os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {endpoint} cannot be reached ({reason}), so models and data sets of the Hub are only "
            "read from the local cache; HF_HUB_OFFLINE=0 asks the Hub nevertheless",
            file=sys.stderr,
            flush=True,
        )
