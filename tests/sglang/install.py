"""Installs SGLang without its kernels for GPUs into a virtual environment: `python tests/sglang/install.py FOLDER`.

Its wheel depends on CUDA packages of several GB, which a CPU does not use: what it imports there is listed instead.
torchvision's wheel is built for torch with CUDA; where torch is a CPU build, it lacks operators that it then declares:
that file is emptied. SGLang uses none of them. Tried with 0.5.23, torch 2.13.0 and Python 3.11 (3.3 GB).
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.5.23"
ROUTER = "sglang-router==0.3.2"
NEEDS = (
    "torch==2.13.0", "torchvision==0.28.0", "transformers==5.19.0", "tokenizers==0.23.2", "triton", "IPython",
    "aiohttp", "anthropic>=0.20.0", "apache-tvm-ffi==0.1.11", "blobfile==3.0.0", "build", "compressed-tensors==0.18.0",
    "datasets", "distro", "easydict", "einops", "fastapi", "gguf", "interegular", "kernels>=0.14.1,<0.15",
    "llguidance>=1.7.6,<2", "mistral_common>=1.11.5", "msgspec", "ninja", "numba==0.65.1", "numpy", "nvidia-ml-py",
    "openai==2.8.0", "openai-harmony==0.0.4", "orjson", "outlines==0.1.11", "packaging", "partial_json_parser",
    "pillow", "prometheus-client>=0.20.0", "psutil", "py-spy", "pybase64", "pydantic", "pyzmq>=25.1.2",
    "python-multipart", "regex", "requests", "scipy", "sentencepiece==0.2.1", "setproctitle", "tiktoken",
    "soundfile==0.13.1", "tqdm", "uvicorn>=0.51", "uvloop", "watchfiles", "xgrammar==0.2.7", "xxhash", "zstandard",
)  # fmt: skip


def install(folder: Path) -> Path:
    """Return the interpreter of the environment, which is made if it does not have this version."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *NEEDS], check=True)
    subprocess.run([*pip, "install", "--quiet", "--no-deps", f"sglang=={VERSION}", ROUTER], check=True)
    if subprocess.run([str(python), "-c", "import torchvision"], capture_output=True, check=False).returncode:
        asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
        (packages / "torchvision" / "_meta_registrations.py").write_text("")
        subprocess.run([str(python), "-c", "import torchvision"], check=True)
    return python


if __name__ == "__main__":
    print(install(Path(sys.argv[1]).absolute()))
