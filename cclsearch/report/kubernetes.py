"""Manifests of a server: for Kubernetes alone, values of llm-d's chart, a graph of Dynamo. Rendered only."""

from __future__ import annotations

import re
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.templates import open_templates
from cclsearch.core.values import Config
from cclsearch.report.launch_form import launch_of_run
from cclsearch.run.spec import RunSpec
from cclsearch.space.table import count_ranks

FORMS = {
    "manifest": "a Deployment and a Service of Kubernetes",
    "llm-d": "values of the chart llm-d-modelservice",
    "dynamo": "a DynamoGraphDeployment",
}
ENGINES = {
    "vllm serve": ("vllm", 2, "vllm/vllm-openai:latest", "ghcr.io/llm-d/llm-d-cuda:v0.5.0", "vllm-runtime"),
    "sglang.launch_server": ("sglang", 3, "lmsysorg/sglang:latest", "", "sglang-runtime"),
    "trtllm-serve": ("trtllm", 1, "nvcr.io/nvidia/tensorrt-llm/release:latest", "", "tensorrtllm-runtime"),
}
"""Title of a launch -> engine, words that start it, its image, llm-d's, and the name of Dynamo's."""
PLACED = ("--host", "--port", "--model-path", "--served-model-name", "--tensor-parallel-size", "--data-parallel-size")
"""Options that values of a chart or a graph state in another place."""
VENDORS = {"mi": ("amd", "amd.com/gpu"), "gaudi": ("intel-gaudi", "habana.ai/gaudi")}


def render_kubernetes(spec: RunSpec, config: Config, form: str) -> str:
    """Return the manifest of a configuration in this form; UserError if its launch has none."""
    launch, ranks = launch_of_run(spec, config), count_ranks(config)
    engine = ENGINES.get(launch.title)
    if engine is None or ranks > spec.card.hardware.accelerators_per_node or launch.files:
        why = "runs on several nodes" if engine and not launch.files else "is not one command of a server"
        raise UserError(f"--kubernetes: the launch of {config} {why}: there is no manifest of it")
    if form == "llm-d" and engine[0] != "vllm":
        raise UserError(f"--kubernetes llm-d: the chart starts vLLM, not {engine[0]}: choose manifest or dynamo")
    words = list(launch.command)
    model = next((words[words.index(name) + 1] for name in ("--model-path", "serve") if name in words), words[1])
    port = words[words.index("--port") + 1]
    words = ["0.0.0.0" if word == "127.0.0.1" else word for word in words]  # other pods reach it
    options, at = [], engine[1] + (engine[0] != "sglang")
    while at < len(words):
        step = 2 if at + 1 < len(words) and not words[at + 1].startswith("--") else 1
        kept = PLACED if form == "llm-d" else PLACED[:4]
        options += [] if words[at] in kept else words[at : at + step]
        at += step
    kind = next((found for start, found in VENDORS.items() if spec.card.hardware.accelerator.startswith(start)), None)
    vendor, resource = kind or ("nvidia", "nvidia.com/gpu")
    image = {"manifest": engine[2], "llm-d": engine[3], "dynamo": f"nvcr.io/nvidia/ai-dynamo/{engine[4]}:latest"}[form]
    return open_templates(Path(__file__).parent).get_template("kubernetes.yaml.j2").render(
        form=form, title=launch.title, what=FORMS[form], provenance=spec.provenance.value, engine=engine[0],
        notes=["choose the image's version: the one that was measured", *launch.notes],
        name=re.sub(r"[^a-z0-9]+", "-", spec.card.name.lower()).strip("-")[:40] or "server", image=image,
        command=words, program=engine[1] - 1 or 1, options=options, model=model, port=port, accelerators=ranks,
        env=[{"name": name, "value": value} for name, value in launch.environment.items()],
        tp=config.get("tp", 1), dp=config.get("dp", 1), vendor=vendor, resource=resource,
    )  # fmt: skip
