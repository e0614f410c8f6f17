"""Posts the result of a search or a night to a chat, within ten seconds; a problem becomes a note and fails nothing."""

from __future__ import annotations

import html
import json
import os
import re
import threading
import urllib.error
import urllib.request
from http.client import HTTPMessage
from typing import IO
from urllib.parse import urlsplit

from cclsearch.core.errors import UserError
from cclsearch.core.offline import is_local_url, refuse_outside
from cclsearch.core.secrets.redact import declare_secret
from cclsearch.core.settings import load_settings

WAIT_S = 10.0
MAX_CHARACTERS = 3000
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


def choose_webhook(given: str | None) -> str | None:
    """Return the variable with the chat's URL, the given or the settings' one; from now on the URL is a secret.

    None without one. Raises UserError, before a search begins, if no message could be sent at its end.
    """
    variable = given or load_settings().webhook_env
    if variable is None:
        return None
    if not _VARIABLE.fullmatch(variable):
        raise UserError(
            "--notify takes the name of an environment variable that holds the URL, not the URL:"
            " export CHAT_URL=https://..., then --notify CHAT_URL"
        )
    declare_secret(variable)
    url = os.environ.get(variable, "").strip()
    if urlsplit(url).scheme not in ("http", "https"):
        wrong = "does not hold an http or https URL" if url else "is not set"
        raise UserError(f"--notify {variable}: the environment variable {wrong}: export {variable}=https://...")
    if not is_local_url(url):
        refuse_outside("the webhook", "leave out --notify, or `webhook_env` in ccl-search.yaml")
    return variable


def send_webhook(variable: str, text: str) -> str | None:
    """Post `{"text": ...}` to the URL in that environment variable; returns the problem, or None.

    The URL is a secret and appears in no message.
    """
    url = os.environ.get(variable, "").strip()
    if not url:
        return f"no message was sent: {variable} is not set"
    if urlsplit(url).scheme not in ("http", "https"):
        return f"no message was sent: the value of {variable} is not an http or https URL"
    problems = [f"no answer within {WAIT_S:g} s"]
    worker = threading.Thread(target=_post, args=(url, text, problems), daemon=True)
    worker.start()
    worker.join(WAIT_S)
    return f"the message may not have arrived: {problems[-1]}" if problems[-1] else None


# The message may name things that only the chat may read.
class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows no redirect to another host, or away from https."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Return the next request; None if the redirect is not followed, which is then an error with its status."""
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.netloc != old.netloc or (old.scheme == "https" and new.scheme != "https"):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _post(url: str, text: str, problems: list[str]) -> None:
    escaped = html.escape(text, quote=False)  # Slack reads `<!channel>` and links as markup
    body = json.dumps({"text": escaped[:MAX_CHARACTERS]}).encode()
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.build_opener(_SameHost).open(request, timeout=WAIT_S) as answer:
            problems.append("" if 200 <= answer.status < 300 else f"status {answer.status}")
    except urllib.error.HTTPError as error:
        problems.append(f"status {error.code}")
    except Exception as error:  # whatever the server does must not fail a search
        problems.append(type(error).__name__)
