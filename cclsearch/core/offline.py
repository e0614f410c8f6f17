"""`--offline`: no connection from this process leaves the machine.

What would connect says so before anything starts (`refuse_outside`); a hook of the interpreter refuses whatever tries
nevertheless, such as a plugin. Commands of the user's cluster (Slurm, SSH to the hosts of a profile) are not refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from cclsearch.core.errors import UserError

OFFLINE_NAME = "CCL_SEARCH_OFFLINE"
_OFF = frozenset(("", "0", "false", "no", "off"))
_BY_OPTION, _BY_SETTINGS = "--offline", "`offline: true` in ccl-search.yaml"
_CONNECTING = frozenset(("socket.connect", "socket.sendto", "socket.sendmsg"))
_RESOLVING = frozenset(("socket.getaddrinfo", "socket.gethostbyname"))
_hook = {"installed": False, "active": False}


class OfflineError(UserError):
    """Something would connect to another machine although the user wants no such connection."""


def find_offline_setting() -> str | None:
    """Return what asks for no connections: the option, environment or the project's settings; None if none does."""
    given = os.environ.get(OFFLINE_NAME, "").strip()
    if given.lower() not in _OFF:
        return given if given in (_BY_OPTION, _BY_SETTINGS) else f"{OFFLINE_NAME}={given}"
    from cclsearch.core.settings import load_settings

    return _BY_SETTINGS if load_settings().offline else None


def refuse_outside(what: str, remedy: str) -> None:
    """Raise OfflineError if the user wants no connection; `what` names the caller, such as "the webhook"."""
    setting = find_offline_setting()
    if setting is not None:
        raise OfflineError(f"{setting} refuses {what}: {remedy}")


def is_local_url(url: str) -> bool:
    """Whether a request to that URL stays on this machine, by its host and the environment's proxies."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        host = urlsplit(proxy if "://" in proxy else f"//{proxy}").hostname or ""
    return is_local_host(host)


def is_local_host(host: str) -> bool:
    """Whether a name or address is this machine's loopback."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@contextlib.contextmanager
def offline(by_option: bool) -> Iterator[None]:
    """Refuse connections of this process meanwhile, if the option or a setting asks for that; children inherit it."""
    before = os.environ.get(OFFLINE_NAME)
    if by_option:
        os.environ[OFFLINE_NAME] = _BY_OPTION
    was_active = _hook["active"]
    setting = find_offline_setting()
    if setting is not None:
        os.environ[OFFLINE_NAME] = setting.removeprefix(f"{OFFLINE_NAME}=")
        if not _hook["installed"]:
            sys.addaudithook(_refuse_connection)  # cannot be removed; `active` decides
        _hook.update(installed=True, active=True)
    try:
        yield
    finally:
        _hook["active"] = was_active
        if before is None:
            os.environ.pop(OFFLINE_NAME, None)
        else:
            os.environ[OFFLINE_NAME] = before


def _refuse_connection(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise OfflineError if the event is a connection to another machine, or a question to a name server."""
    if not _hook["active"] or not event.startswith("socket."):
        return
    host = ""
    if event in _CONNECTING:
        address = arguments[1] if len(arguments) > 1 else None
        host = str(address[0]) if isinstance(address, tuple) and address else ""
    elif event in _RESOLVING:
        name = arguments[0]
        host = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name or "")
    if host and not is_local_host(host) and host not in ("0.0.0.0", "::", socket.gethostname()):
        raise OfflineError(f"offline: a connection to {host!r} was refused")
