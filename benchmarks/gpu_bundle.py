"""What `gpu.py` needs besides torch and JAX, as wheels, for a GPU machine without internet.

    python benchmarks/gpu_bundle.py collect --python 3.12     here: downloads wheels into .gpu-bundle/ of the checkout
    python benchmarks/gpu_bundle.py install                   there: puts those that are missing into .gpu-site/

`install` asks pip which of the requirements the machine's own packages do not meet and adds only these, outside the
machine's packages; `gpu.py` finds them in `.gpu-site/`. Copy the checkout with `.gpu-bundle/` in it.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUNDLE, SITE = ROOT / ".gpu-bundle", ROOT / ".gpu-site" / f"{sys.version_info.major}.{sys.version_info.minor}"
LIST = "requirements.txt"
OTHER_COMMANDS = {
    **dict.fromkeys(("anthropic", "openai", "tenacity", "pydantic-monty"), "the LLM agent"),
    **dict.fromkeys(("pandas",), "export"),
    **dict.fromkeys(("submitit",), "Slurm"),
    **dict.fromkeys(("vl-convert-python",), "charts"),
}
"""Dependencies that only other commands use."""
GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28")
"""Versions of the C library that a wheel may be built for; pip matches each exactly."""
MAX_MB = 64
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def list_requirements() -> list[str]:
    """Return the project's dependencies that `gpu.py` uses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [text for text in project["dependencies"] if re.split(r"[^\w-]", text)[0] not in OTHER_COMMANDS]


def collect(python: str, machine: str) -> int:
    """Download the wheels for that Python and processor."""
    if not re.fullmatch(r"3\.\d{1,2}", python):
        print(
            f"give the GPU machine's Python as 3.MINOR (make gpu-bundle PYTHON=3.12), not {python!r}", file=sys.stderr
        )
        return 2
    BUNDLE.mkdir(exist_ok=True)
    for old in BUNDLE.glob("*.whl"):
        old.unlink()
    (BUNDLE / LIST).write_text("\n".join(list_requirements()) + "\n", encoding="utf-8")
    platforms = [f"manylinux_{glibc}_{machine}" for glibc in GLIBC] + [f"manylinux2014_{machine}"]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    options += [word for name in platforms for word in ("--platform", name)]
    done = subprocess.run([*PIP, "download", "-q", *options, "-d", str(BUNDLE), "-r", str(BUNDLE / LIST)])
    if done.returncode:
        return 1
    wheels = list(BUNDLE.glob("*.whl"))
    size_mb = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{BUNDLE}: {len(wheels)} wheels, {size_mb:.0f} MB, for Python {python} on {machine}")
    print("on the GPU machine: python benchmarks/gpu_bundle.py install && python benchmarks/gpu.py")
    if size_mb > MAX_MB:
        print(f"the bundle is larger than {MAX_MB} MB", file=sys.stderr)
    return int(size_mb > MAX_MB)


def install() -> int:
    """Put the wheels that this machine's packages do not replace into `.gpu-site/`."""
    if not (BUNDLE / LIST).is_file():
        print(f"{BUNDLE} is missing: make it with `make gpu-bundle PYTHON=3.MINOR` and copy it here", file=sys.stderr)
        return 2
    source = ["--no-index", "--find-links", str(BUNDLE)]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        planned = ["install", "-q", "--dry-run", "--report", str(report), *source, "-r", str(BUNDLE / LIST)]
        if subprocess.run([*PIP, *planned]).returncode:
            return 1
        wanted = [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
    missing = [f"{package['name']}=={package['version']}" for package in wanted]
    if missing:
        options = ["--no-deps", "--no-compile", "--upgrade", "--target", str(SITE)]
        if subprocess.run([*PIP, "install", "-q", *source, *options, *missing]).returncode:
            return 1
    print(f"{SITE}: {', '.join(missing) or 'nothing is missing'}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    collecting = actions.add_parser("collect")
    collecting.add_argument("--python", required=True, metavar="3.MINOR")
    collecting.add_argument("--machine", default=platform.machine(), help="processor: x86_64, aarch64")
    actions.add_parser("install")
    args = parser.parse_args()
    return collect(args.python, args.machine) if args.action == "collect" else install()


if __name__ == "__main__":
    sys.exit(main())
