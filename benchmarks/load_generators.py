"""Our load generator beside vLLM's own (`vllm bench serve`) and guidellm, in turns on the same real vLLM server.

    python benchmarks/load_generators.py --python VLLM_PYTHON [--guidellm GUIDELLM_PYTHON] [--rounds 3]

VLLM_PYTHON is the interpreter that `python tests/vllm/install.py FOLDER` prints, GUIDELLM_PYTHON one of an environment
with guidellm 0.8.1 (`pip install guidellm==0.8.1`). The server has a small Llama with random weights and a tokenizer of
one word per token, since the others send text. All ask for the same lengths with the same number of clients; guidellm's
prompts are all the same, and the server caches no prefixes. TPOT is (end - first token) / (tokens - 1) of each request,
averaged over requests.

A round is one turn of each generator and then one of each in the opposite order (A B C C B A), so that a drift of the
server or the machine, if it is even, adds the same to each. The ratios are of rounds; the load of the machine before
each turn is printed, since all share its cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean, median

LAUNCHERS = Path(__file__).resolve().parent.parent / "launchers"
sys.path.insert(0, str(LAUNCHERS))

from serving_load import Load, Target, run_load, summarize_load  # noqa: E402
from serving_model import describe_model  # noqa: E402
from serving_run import Server, find_port  # noqa: E402

INPUT, OUTPUT, CLIENTS, REQUESTS, VOCAB = 192, 32, 8, 96, 1024
ARCH = {
    "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "hidden_size": 256, "intermediate_size": 512,
    "vocab_size": VOCAB, "tied_embeddings": False, "gated_mlp": True, "moe": None,
}  # fmt: skip
TOKENIZER = f"""
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = {{f"w{{number}}": number for number in range({VOCAB})}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(sys.argv[1])
"""
FIGURES = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
Figures = Mapping[str, float]


@contextlib.contextmanager
def serve(python: Path, folder: Path) -> Iterator[Server]:
    """A vLLM server of the small model, ended after the block."""
    model, port = folder / "model", find_port()
    model.mkdir()
    (model / "config.json").write_text(json.dumps(describe_model(ARCH, 1024)))
    subprocess.run([python, "-c", TOKENIZER, model], check=True)
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", "model"]
    command += ["--port", port]
    command += ["--load-format", "dummy", "--max-model-len", 1024, "--enforce-eager", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--no-enable-prefix-caching", "--max-num-seqs", 16]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=out, start_new_session=True, env=make_environment()
        )
    server = Server(process, port, log)
    try:
        server.await_health(600)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        server.stop()


def make_environment() -> dict[str, str]:
    """The variables of the server and of the other generator: nothing is downloaded or reported."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **quiet}


def run_ours(server: Server, number: int) -> Mapping[str, float]:
    requests = [{"arrival_s": 0.0, "input_tokens": INPUT, "output_tokens": OUTPUT}] * REQUESTS
    found = summarize_load(run_load(Target(server.port, VOCAB), Load(number, requests, CLIENTS, 0))[0])
    times = {name: 1e3 * found[f"{name}_mean_s"] for name in ("ttft", "tpot")}
    return dict(zip(FIGURES, (times["ttft"], times["tpot"], found["output_tokens_per_s"]), strict=True))


def run_vllm_bench(server: Server, python: Path, folder: Path, number: int) -> Mapping[str, float]:
    command = [python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--model", "model"]
    command += ["--tokenizer", folder / "model", "--base-url", f"http://127.0.0.1:{server.port}", "--seed", number]
    command += ["--dataset-name", "random", "--random-input-len", INPUT, "--random-output-len", OUTPUT, "--ignore-eos"]
    command += ["--num-prompts", REQUESTS, "--max-concurrency", CLIENTS, "--save-result"]
    command += ["--result-dir", folder, "--result-filename", f"bench-{number}.json"]
    call(command)
    found = json.loads((folder / f"bench-{number}.json").read_text())
    assert found["completed"] == REQUESTS, found
    return dict(zip(FIGURES, (found["mean_ttft_ms"], found["mean_tpot_ms"], found["output_throughput"]), strict=True))


def run_guidellm(server: Server, python: Path, folder: Path, number: int) -> Mapping[str, float]:
    """The words of its prompts are unknown to the tokenizer: all become one token, which must not be a special one:
    guidellm leaves those out, and then has no prompt to send."""
    path, url = folder / f"guidellm-{number}.json", f"http://127.0.0.1:{server.port}"
    command: list[object] = [python, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url},model=model,request_format=/v1/completions"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={folder / 'model'}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
    command += ["--profile", f"kind=concurrent,streams={CLIENTS}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={path}"]
    call(command)
    sent = json.loads(path.read_text())["benchmarks"][0]["requests"]["successful"]
    assert len(sent) == REQUESTS
    assert {(each["prompt_tokens"], each["output_tokens"]) for each in sent} == {(INPUT, OUTPUT)}
    window_s = max(each["request_end_time"] for each in sent) - min(each["request_start_time"] for each in sent)
    times = (mean(each[name] for each in sent) for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return dict(zip(FIGURES, (*times, REQUESTS * OUTPUT / window_s), strict=True))


def call(command: list[object]) -> None:
    """Run a command; its output is shown if it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=make_environment(), check=False)
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def run_rounds(generators: Mapping[str, Callable[[int], Mapping[str, float]]], rounds: int) -> dict[str, list[Figures]]:
    """Return the figures of each generator: in a round, the means of its two turns."""
    found: dict[str, list[Figures]] = {name: [] for name in generators}
    for number in range(rounds):
        turns: dict[str, list[Mapping[str, float]]] = {name: [] for name in generators}
        for place, name in enumerate([*generators, *reversed(generators)]):
            busy = os.getloadavg()[0]
            turns[name].append(generators[name](number * 2 * len(generators) + place))
            words = ", ".join(f"{figure} {turns[name][-1][figure]:.1f}" for figure in FIGURES)
            print(f"round {number + 1}, {name}: {words}; load of the machine before: {busy:.1f}", flush=True)
        for name, own in turns.items():
            found[name].append({figure: mean(turn[figure] for turn in own) for figure in FIGURES})
    return found


def print_table(found: Mapping[str, list[Figures]]) -> None:
    """Print the median round of each generator, and its ratio to ours in the same round: median, least and most."""
    print("\n| generator | TTFT (ms) | TPOT (ms) | tokens/s | TTFT, TPOT, tokens/s beside ours (least to most) |")
    print("| --- | --- | --- | --- | --- |")
    for name, own in found.items():
        values = [f"{median(each[figure] for each in own):.1f}" for figure in FIGURES]
        ratios = []
        for figure in FIGURES:
            each = sorted(a[figure] / b[figure] for a, b in zip(own, found["ours"], strict=True))
            ratios.append(f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})")
        print(f"| {name} | {' | '.join(values)} | {', '.join(ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--guidellm", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    python, began_s = args.python.absolute(), time.monotonic()
    with tempfile.TemporaryDirectory() as name, serve(python, Path(name)) as server:
        folder = Path(name)
        generators: dict[str, Callable[[int], Mapping[str, float]]] = {
            "ours": lambda turn: run_ours(server, turn),
            "vllm bench serve": lambda turn: run_vllm_bench(server, python, folder, turn),
        }
        if args.guidellm is not None:
            other = args.guidellm.absolute()
            generators["guidellm"] = lambda turn: run_guidellm(server, other, folder, turn)
        run_ours(server, 1000)  # warms up
        found = run_rounds(generators, args.rounds)
    print(
        f"\n{args.rounds} rounds, in each two turns of {REQUESTS} requests, {INPUT} tokens in and {OUTPUT} out,",
        end=" ",
    )
    print(f"{CLIENTS} at once; {time.monotonic() - began_s:.0f} s with the start of the server")
    print_table(found)


if __name__ == "__main__":
    main()
