"""What privacy costs on larger models: `python -m benchmarks.models [--peers] [--device cpu|gpu]`.

One step is the gradient of one batch and an SGD update: ordinary training in JAX, ghost clipping by
mirrordp and, with --peers, jax-privacy, without sampling and noise. Each model is a process of its
own, in which the timed rounds of all methods alternate, and ratios are to ordinary training in the
same process. Memory is what the compiled program needs by its own analysis (arguments, results and
temporary buffers), not a measured peak. With --peers, GPT-2 with an untied output layer also runs
under Opacus in a further process, beside PyTorch's own step; `--torch-python` names the interpreter
that has torch and opacus.

    python -m benchmarks.models --device gpu --peers --out FILE    all rows; run again to resume
    python -m benchmarks.models --sizes tiny                       minutes on two cores
    python -m benchmarks.models --models 'lora-*' wrn-16-4         some rows
    python -m benchmarks.models --models gpt2-small-512 --only-plan
    python -m benchmarks.models --models --out FILE --figure PNG   no new rows, table and figure

With --out, each row is appended as one line of JSON when it is ready, and rows that the file
already has are not measured again. A new version of the code needs a new file.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import large_models, model_steps
from benchmarks.model_steps import NOT_PRIVATE, OURS, THEIRS

PYTORCH = "PyTorch, not private"
OPACUS = {PYTORCH: "not private", "Opacus hooks": "hooks", "Opacus ghost": "ghost"}
"""Names in the table, and the modes of `benchmarks.opacus_gpt2`."""

Line = dict[str, Any]


# Measurements


def runs_opacus(name: str) -> bool:
    """Returns whether a model is also written in PyTorch: GPT-2 without options."""
    return re.fullmatch(r"gpt2-\w+-\d+", name) is not None


def wanted_methods(name: str, peers: bool, microbatch_size: int | None) -> list[str]:
    """Returns all columns that a row should have."""
    opacus = list(OPACUS) if peers and runs_opacus(name) else []
    return model_steps.method_names(peers, microbatch_size) + opacus


def last_object(command: Sequence[str], device: str) -> dict[str, Any]:
    """Runs a process and returns the JSON object in its last line, or {"failed": why}."""
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    if found.returncode == 0:
        return json.loads(found.stdout.splitlines()[-1])
    said = found.stderr.strip().splitlines() or ["nothing"]
    return {"failed": f"exit {found.returncode}: {said[-1][:160]}"}


def opacus(name: str, sizes: str, device: str, python: str) -> dict[str, Any]:
    """Measures PyTorch's step and Opacus' modes."""
    size, positions = re.fullmatch(r"gpt2-(\w+)-(\d+)", name).groups()
    stack, batch, vocabulary = large_models.GPT2[size], large_models.BATCHES[int(positions)], 50257
    shape = [stack.layers, stack.width, stack.heads, int(positions), batch, vocabulary]
    if sizes == "tiny":
        stack = large_models.TINY
        shape = [stack.layers, stack.width, stack.heads, int(positions) // 32, 4, 61]
    command = [python, "-m", "benchmarks.opacus_gpt2", *map(str, shape), device]
    found = last_object(command, device)
    modes = found.get("methods", dict.fromkeys(OPACUS.values(), found))
    return {
        "methods": {label: modes[mode] for label, mode in OPACUS.items()},
        "versions": found.get("versions", {}),
    }


def measure_row(name: str, options: argparse.Namespace) -> Line:
    """Measures one row in processes of its own."""
    line = {"model": name, "sizes": options.sizes, "on": options.device}
    command = [sys.executable, "-m", "benchmarks.model_steps", name, "--sizes", options.sizes]
    command += ["--device", options.device, "--rounds", str(options.rounds)]
    command += ["--peers"] * options.peers
    if options.microbatch_size:
        command += ["--microbatch-size", str(options.microbatch_size)]
    line |= last_object(command, options.device)
    if options.peers and runs_opacus(name) and "failed" not in line:
        found = opacus(name, options.sizes, options.device, options.torch_python)
        line["methods"] |= found["methods"]
        line["versions"] |= found["versions"]
    return line


def is_done(name: str, options: argparse.Namespace, lines: Sequence[Line]) -> bool:
    """Returns whether a line has all methods of a row; rows that failed are tried again."""
    methods = set(wanted_methods(name, options.peers, options.microbatch_size))
    return any(
        (line["model"], line["sizes"], line["on"]) == (name, options.sizes, options.device)
        and methods <= set(line.get("methods", ()))
        for line in lines
    )


def read_lines(path: Path | None) -> list[Line]:
    """Reads the lines of a file that need not exist; a line that was cut short is left out."""
    if path is None or not path.exists():
        return []
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path}: a line is not JSON, so its row is measured again", file=sys.stderr)
    return found


def append_line(path: Path, line: Line) -> None:
    """Appends a line, also after one that was cut short."""
    before = path.read_text() if path.exists() else ""
    with path.open("a") as file:
        file.write("\n" * (before != "" and not before.endswith("\n")) + json.dumps(line) + "\n")


# The table and the figure


def latest(lines: Sequence[Line]) -> list[Line]:
    """Returns the last line of each row, in the table's order and other models behind."""
    rows = {(line["sizes"], line["on"], line["model"]): line for line in lines}
    order = {name: number for number, name in enumerate(large_models.TABLE)}
    return sorted(rows.values(), key=lambda line: order.get(line["model"], len(order)))


def ratio(line: Line, method: str, quantity: str) -> float | None:
    """Returns a method's time ("ms") or memory ("gib") as a multiple of ordinary training's."""
    base = PYTORCH if method in OPACUS else NOT_PRIVATE
    methods = line.get("methods", {})
    pair = [methods.get(name, {}).get(quantity) for name in (method, base)]
    return None if None in pair else pair[0] / pair[1]


def cell(line: Line, method: str) -> str:
    """Returns a method's time and memory, or why there are none."""
    found = line.get("methods", {}).get(method)
    if found is None:
        return "-"
    if "RESOURCE_EXHAUSTED" in found.get("failed", ""):
        return "out of memory"
    if "failed" in found:
        return "failed: " + found["failed"].replace("|", "/")
    if method in (NOT_PRIVATE, PYTORCH):
        return f"{found['ms']:.2f} ms, {memory(found['gib'])}"
    if (time := ratio(line, method, "ms")) is None:
        return f"{found['ms']:.2f} ms, {memory(found['gib'])}"
    space = ratio(line, method, "gib")
    return f"{time:.2f}x, {'-' if space is None else f'{space:.2f}x'}"


def memory(gib: float | None) -> str:
    if gib is None:
        return "-"
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{1024 * gib:.2f} MiB"


def methods_of(lines: Sequence[Line]) -> list[str]:
    """Returns the methods that any line has: known ones first, in their order."""
    known = [NOT_PRIVATE, OURS, THEIRS]
    seen = dict.fromkeys(method for line in lines for method in line.get("methods", ()))
    return [m for m in known if m in seen] + [
        m for m in seen if m not in known and m not in OPACUS
    ] + [m for m in OPACUS if m in seen]  # fmt: skip


def table(lines: Sequence[Line]) -> str:
    """Formats lines as Markdown, with versions and device: time, then memory."""
    lines = latest(lines)
    methods = methods_of(lines)
    out = [
        "| model | batch | " + " | ".join(methods) + " | explicit parameters |",
        "|---" * (3 + len(methods)) + "|",
    ]
    for line in lines:
        name = line["model"] + (" (tiny)" if line["sizes"] == "tiny" else "")
        if "failed" in line:
            cells = ["-", "failed: " + line["failed"].replace("|", "/")]
            cells += ["-"] * len(methods)
        else:
            paths = line["paths"]
            explicit = f"{paths.get('explicit', 0)} of {sum(paths.values())}"
            cells = [str(line["batch"]), *(cell(line, method) for method in methods), explicit]
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    versions = dict.fromkeys(
        ", ".join(f"{key} {value}" for key, value in line["versions"].items())
        for line in lines
        if "versions" in line
    )
    return "\n".join([*out, "", *versions])


def figure(lines: Sequence[Line], path: Path) -> None:
    """Draws time and memory as multiples of ordinary training, one group of bars per model."""
    from matplotlib.figure import Figure

    lines = [line for line in latest(lines) if "methods" in line]
    private = [m for m in methods_of(lines) if m not in (NOT_PRIVATE, PYTORCH)]
    methods = [m for m in private if any(ratio(line, m, "ms") for line in lines)]
    lines = [line for line in lines if any(ratio(line, m, "ms") for m in methods)]
    height = 0.8 / max(1, len(methods))
    drawn = Figure(figsize=(11, 1.5 + 0.35 * len(lines)), layout="constrained")
    for axes, quantity, title in zip(
        drawn.subplots(1, 2, sharey=True), ("ms", "gib"), ("time", "memory"), strict=True
    ):
        for number, method in enumerate(methods):
            ratios = [ratio(line, method, quantity) or 0.0 for line in lines]
            places = [place + (number + 0.5) * height - 0.4 for place in range(len(lines))]
            axes.barh(places, ratios, height, label=method)
        axes.axvline(1.0, color="black", lw=0.8)
        axes.set_xlabel(f"{title}, multiple of ordinary training")
    axes.set_yticks(range(len(lines)), [line["model"] for line in lines])
    # The first row of the table is at the top.
    axes.invert_yaxis()
    drawn.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    drawn.savefig(path, dpi=150)


# The command


def chosen_names(patterns: Sequence[str] | None, sizes: str) -> list[str]:
    """Returns the table's rows, those that match a pattern, and models by their full names."""
    names = large_models.table_names(sizes)
    if patterns is None:
        return names
    found = []
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern) or [pattern] * (pattern in large_models.MODELS)
        if not matches:
            raise ValueError(
                f"--models must name models or match rows of the table, got {pattern!r}. "
                f"The rows are {', '.join(names)}."
            )
        found += matches
    return list(dict.fromkeys(found))


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--peers", action="store_true", help="also jax-privacy and Opacus")
    parser.add_argument("--models", nargs="*", metavar="NAME", help="rows, or patterns of rows")
    parser.add_argument("--sizes", choices=["full", "tiny"], default="full")
    parser.add_argument("--out", type=Path, help="file to which rows are appended")
    parser.add_argument("--figure", type=Path, help="draw the ratios into this file")
    parser.add_argument("--only-plan", action="store_true", help="print paths of the parameters")
    parser.add_argument(
        "--microbatch-size", type=int, help="also measure with this many examples at a time"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = arguments_parser()
    options = parser.parse_args(arguments)
    try:
        names = chosen_names(options.models, options.sizes)
    except ValueError as error:
        parser.error(str(error))
    if options.only_plan:
        jax.config.update("jax_platforms", "cpu" if options.device == "cpu" else "cuda")
        for name in names:
            print(f"\n{name}, {options.sizes}")
            model_steps.plan(large_models.make(name, options.sizes))
        return
    lines = read_lines(options.out)
    for name in names:
        if is_done(name, options, lines):
            print(f"{name}: already measured", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        lines.append(measure_row(name, options))
        if options.out is not None:
            append_line(options.out, lines[-1])
    print(table(lines))
    if options.figure is not None:
        figure(lines, options.figure)


if __name__ == "__main__":
    main()
