"""Build hook: compiles the scanner of traces (see `build.py` beside its C source) if there is a C compiler.

Without a compiler the build succeeds, the package is pure Python and reads traces more slowly.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

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
