"""Tells a chat that the night is over. It is given ten seconds, and whatever goes wrong is a note, never a failure."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

WAIT_S = 10.0
MAX_CHARACTERS = 3000


def send_webhook(variable: str, text: str) -> str | None:
    """Post `{"text": ...}` to the URL in that environment variable; returns what went wrong, None where nothing did.

    The URL is a secret: it is in no message.
    """
    url = os.environ.get(variable, "").strip()
    if not url:
        return f"no message was sent: {variable} is not set"
    if urlsplit(url).scheme not in ("http", "https"):
        return f"no message was sent: {variable} holds no http or https URL"
    told = ["no answer in time"]
    worker = threading.Thread(target=_post, args=(url, text, told), daemon=True)
    worker.start()
    worker.join(WAIT_S)
    return f"the message may not have arrived: {told[-1]}" if told[-1] else None


def _post(url: str, text: str, told: list[str]) -> None:
    body = json.dumps({"text": escape_slack(text)[:MAX_CHARACTERS]}).encode()
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            told.append("" if 200 <= answer.status < 300 else f"status {answer.status}")
    except urllib.error.HTTPError as error:
        told.append(f"status {error.code}")
    except Exception as error:  # the other side is foreign code: it must not fail the night
        told.append(type(error).__name__)


def escape_slack(text: str) -> str:
    """The text with the three characters escaped that Slack reads as markup (`<!channel>`, links)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
