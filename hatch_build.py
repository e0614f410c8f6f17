"""Build hooks: the scanner of traces is compiled, and README gets links that work on a package index.

The scanner (see `build.py` beside its C source) needs a C compiler. Without one the build succeeds, the package is pure
Python and reads traces more slowly.

The project names no host. Whoever publishes it says where the files of this version can be read, and README's links and
pictures become absolute: `CCL_SEARCH_URL=https://HOST/OWNER/ccl-search/raw/v0.3.0 python -m build`. Without it a link
becomes the name of its file, which is in the package, and a picture its description: nothing points nowhere.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import platform_tags

ADDRESS = "CCL_SEARCH_URL"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
BUILD = "cclsearch/trace/readers/native/build.py"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library to a wheel; for an editable install it stays beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a failure is reported, and the build continues without the library."""
        build = runpy.run_path(str(Path(self.root) / BUILD))
        problem = build["compile_scanner"]()
        if problem:
            self.app.display_warning(f"the fast scanner of traces was not built ({problem}): Python reads traces")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{next(iter(platform_tags()))}"
        if version != "editable":
            library = build["TARGET"]
            build_data["force_include"][str(library)] = str(library.relative_to(Path(self.root).resolve()))


class CustomMetadataHook(MetadataHookInterface):
    """Sets the long description, and the addresses of the project if there is one."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README and the environment."""
        base = os.environ.get(ADDRESS, "").rstrip("/")
        if base and not re.fullmatch(r"https?://[^\s<>\"'()]+", base):
            raise ValueError(
                f"{ADDRESS} is the address of this version's files, such as https://HOST/PATH, not {base!r}"
            )
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": resolve_links(text, base)}
        pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Source": "README.md"}
        metadata["urls"] = {name: f"{base}/{path}" for name, path in pages.items()} if base else {}


def resolve_links(text: str, base: str) -> str:
    """Return Markdown whose relative links start at `base`; without a base they are names of files."""

    def resolve(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        if base:
            return f"{picture}[{words}]({base}/{target})"
        name = target.partition("#")[0]
        if picture:
            return f"*(picture: {words})*"
        return f"`{name}`" if words == name else f"{words} (`{name}`)"

    return LINK.sub(resolve, text)
