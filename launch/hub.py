"""Finds out with one short request whether the Hub can be reached.

Without a network, huggingface_hub, transformers and datasets repeat each request several times, which takes
minutes for a handful of names. If the Hub cannot be reached, HF_HUB_OFFLINE is therefore set before these
libraries are imported: they then read only their caches, and fail at once if a name is not there.
"""

from __future__ import annotations

import os
import queue
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Collection

HUB = "https://huggingface.co"
SECONDS = 10.0  # time limit of the request; huggingface_hub's own limit for the same request is 10 s too
# With one of these variables, the request would differ from those of the libraries: the user has decided
# already, or urllib does not know the kind of proxy.
DECIDED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "ALL_PROXY", "all_proxy")


def use_caches_without_the_hub(names: Collection[str], seconds: float = SECONDS) -> None:
    """Sets HF_HUB_OFFLINE if a run needs the Hub for ``names`` and the Hub cannot be reached.

    Only the first rank of each node asks, since the others send no requests of their own. Does nothing if the
    user has set HF_HUB_OFFLINE, even to 0, or if huggingface_hub is imported and has read it already.
    """
    decided = any(name in os.environ for name in DECIDED) or "huggingface_hub" in sys.modules
    if not names or decided or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    reason = why_unreachable(endpoint, seconds)
    if reason is None:
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    if os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {endpoint} cannot be reached ({reason}), so models and data sets of the Hub are only "
            "read from the local cache; HF_HUB_OFFLINE=0 asks the Hub nevertheless",
            file=sys.stderr,
            flush=True,
        )


def why_unreachable(url: str, seconds: float) -> str | None:
    """Returns why no server answers a request, or None if one does, whatever its answer is.

    The request runs in a thread, since a look-up of a name has no time limit of its own.
    """
    answer: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(ask(url, seconds)), daemon=True).start()
    try:
        return answer.get(timeout=seconds)
    except queue.Empty:
        return f"no answer within {seconds:g} s"


def ask(url: str, seconds: float) -> str | None:
    """Sends one request; returns why it failed, or None for any answer."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
    except urllib.error.HTTPError:
        return None  # an answer
    except urllib.error.URLError as error:
        # huggingface_hub may trust certificates that Python does not
        if isinstance(error.reason, ssl.SSLError):
            return None
        reason = error.reason
        return (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (OSError, ValueError) as error:
        return str(error)
    return None
