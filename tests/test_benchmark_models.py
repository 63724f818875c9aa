"""The larger models of `benchmarks.models`, tiny, and its table; times are never asserted."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import large_models, model_steps, models, scaling
from mirrordp.privacy import clipping, ghost

# One of each kind; the other rows differ in sizes alone. The clip norm lies between the norms.
FAMILIES = {
    "gpt2-small-512": 20.0,
    "gpt2-small-512-scan-tied-checkpoint": 2.55,
    "gpt2-small-512-tied-bf16": 2.55,
    "vit-base": 50.0,
    "bert-base-mlm": 6.0,
    "roberta-base-classify": 18.0,
    "lora-8-added": 0.1,
    "lora-8-merged": 0.1,
    "wrn-16-4-views": 15.0,
}


@pytest.mark.usefixtures("nothing_reserved")
@pytest.mark.parametrize("name", FAMILIES)
def test_ghost_clipping_equals_explicit_gradients(name):
    model, clip = large_models.make(name, "tiny"), FAMILIES[name]
    rows = model_steps.batch_size(model.batch)
    is_padding = jnp.arange(rows) == rows - 1

    @jax.jit
    def both(params, batch):
        makers = [module.clipped_grad for module in (clipping, ghost)]
        found = [make(model.loss, l2_clip_norm=clip, trainable=model.trainable) for make in makers]
        return [one.with_stats(params, batch, is_padding) for one in found]

    (wanted, wanted_stats), (found, stats) = both(model.params, model.batch)
    norms = np.asarray(wanted_stats.unprivatized_norms)[:-1]
    assert norms.min() < clip < norms.max()
    tolerance = 2e-2 if "bf16" in name else 1e-4
    np.testing.assert_allclose(stats.unprivatized_norms[:-1], norms, rtol=tolerance)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # A bias before a normalisation has no gradient but rounding.
        allowed = tolerance * np.linalg.norm(other) + 1e-6 * clip
        assert np.linalg.norm(one - other) < allowed


def test_every_row_of_the_table_has_a_name_of_a_model():
    assert len(set(large_models.TABLE)) == len(large_models.TABLE)
    assert set(large_models.TABLE) <= set(large_models.MODELS)
    assert {name.split("-")[1] for name in large_models.TABLE if name.startswith("gpt2")} == {
        "small",
        "medium",
        "large",
    }
    assert not any("medium" in name for name in large_models.table_names("tiny"))


def test_tied_heads_and_stacked_layers_are_as_the_name_says():
    plain = large_models.make("gpt2-small-512", "tiny").params
    other = large_models.make("gpt2-small-512-scan-tied", "tiny").params
    assert "head" in plain
    assert "head" not in other
    assert isinstance(plain["layers"], list)
    assert other["layers"]["qkv"]["w"].shape == (2, *plain["layers"][0]["qkv"]["w"].shape)


def test_both_forms_of_adapters_are_the_same_function():
    added, merged = (large_models.make(f"lora-8-{form}", "tiny") for form in ("added", "merged"))
    losses = jax.jit(lambda params, row: (added.loss(params, row), merged.loss(params, row)))
    values = losses(added.params, added.batch[0])
    np.testing.assert_allclose(*values, rtol=1e-5)


def test_measures_side_by_side_and_keeps_failures():
    """jax-privacy refuses microbatches that do not divide the batch."""
    model = large_models.make("lora-8-merged", "tiny")
    methods = model_steps.method_names(peers=True, microbatch_size=3)[1:]
    assert methods == ["mirrordp", "jax-privacy", *(f"{m}, 3 at a time" for m in methods[:2])]
    asked = ["not private", "mirrordp", "jax-privacy, 3 at a time"]
    found = model_steps.measured(model, asked, rounds=1, seconds_per_round=0.0)
    assert list(found) == asked
    assert "failed" in found.pop("jax-privacy, 3 at a time")
    for numbers in found.values():
        assert numbers["ms"] > 0
        # At least the parameters and the batch.
        size = sum(leaf.nbytes for leaf in jax.tree.leaves((model.params, model.batch)))
        assert size <= numbers["gib"] * 2**30 < 100 * size


def line(name="gpt2-small-512", **methods):
    numbers = {
        "not private": {"ms": 40.0, "gib": 10.0},
        "mirrordp": {"ms": 46.0, "gib": 11.0},
    }
    return {
        "model": name,
        "sizes": "full",
        "on": "gpu",
        "batch": 16,
        "methods": numbers | methods,
        "versions": {"jax": "0.10.2", "device": "H200"},
        "paths": {"gram": 3, "explicit": 1},
    }


LINES = [
    line("wrn-16-4", **{"jax-privacy": {"failed": "XlaRuntimeError: out | of memory"}}),
    line("vit-base", mirrordp={"ms": 99.0, "gib": 9.0}),
    {"model": "lora-8-added", "sizes": "full", "on": "gpu", "failed": "exit -9: Killed"},
    line(
        **{
            "PyTorch, not private": {"ms": 50.0, "gib": 20.0},
            "Opacus hooks": {"ms": 100.0, "gib": 50.0},
        }
    ),
    line("vit-base"),
]


def test_table_has_ratios_failures_and_the_latest_line_of_each_row():
    rows = models.table(LINES).splitlines()
    assert rows == [
        "| model | batch | not private | mirrordp | jax-privacy | PyTorch, not private | "
        "Opacus hooks | explicit parameters |",
        "|---|---|---|---|---|---|---|---|",
        "| gpt2-small-512 | 16 | 40.00 ms, 10.0 GiB | 1.15x, 1.10x | - | 50.00 ms, 20.0 GiB | "
        "2.00x, 2.50x | 1 of 4 |",
        "| vit-base | 16 | 40.00 ms, 10.0 GiB | 1.15x, 1.10x | - | - | - | 1 of 4 |",
        "| lora-8-added | - | failed: exit -9: Killed | - | - | - | - | - |",
        "| wrn-16-4 | 16 | 40.00 ms, 10.0 GiB | 1.15x, 1.10x | "
        "failed: XlaRuntimeError: out / of memory | - | - | 1 of 4 |",
        "",
        "jax 0.10.2, device H200",
    ]


def test_figure_has_a_bar_for_each_model(tmp_path):
    models.figure(LINES, tmp_path / "ratios.svg")
    drawn = (tmp_path / "ratios.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("vit-base", "wrn-16-4", "mirrordp"))
    # Neither a row without times nor a method that failed everywhere.
    assert "<!-- lora-8-added -->" not in drawn
    assert "<!-- jax-privacy -->" not in drawn


def test_rows_of_the_file_are_not_measured_again(tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.jsonl"
    measured = []

    def measure_row(name, options):
        measured.append(name)
        if name == "wrn-16-4":
            return {"model": name, "sizes": "full", "on": "gpu", "failed": "exit 1: no"}
        return line(name)

    monkeypatch.setattr(models, "measure_row", measure_row)
    command = ["--device", "gpu", "--out", str(out), "--models", "wrn-16-4"]
    models.main([*command, "vit-base"])
    # An interrupted run may leave half a line behind.
    with out.open("a") as file:
        file.write('{"model": "bert')
    models.main([*command, "vit-base", "lora-8-*"])
    assert measured == ["wrn-16-4", "vit-base", "wrn-16-4", "lora-8-added", "lora-8-merged"]
    assert len(models.read_lines(out)) == 5
    models.main(["--peers", *command[:-1], "vit-base"])
    assert measured[-1] == "vit-base"
    assert "vit-base: already measured" in capsys.readouterr().err


def test_a_process_that_fails_becomes_an_entry():
    found = models.opacus("gpt2-small-512", "tiny", "cpu", "false")["methods"]
    assert list(found) == list(models.OPACUS)
    assert all(entry == {"failed": "exit 1: nothing"} for entry in found.values())


def test_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        models.main(["--models", "gpt5"])
    assert "got 'gpt5'. The rows are gpt2-small-512," in capsys.readouterr().err


def test_only_plan_prints_the_path_of_each_parameter(capsys):
    models.main(["--models", "lora-8-merged", "--sizes", "tiny", "--only-plan"])
    assert capsys.readouterr().out.count("['adapters']") == 4


def test_the_page_on_scaling_has_the_numbers_of_the_cost_model():
    """From what was measured and stored; nothing is measured here."""
    page = (scaling.RESULTS.parent.parent / "docs" / "scaling.md").read_text()
    measured = json.loads(scaling.FILE.read_text())
    sent = measured["reduction in the program"]
    assert sent["bytes"] == 8 * sent["parameters"]
    for kind, model, devices in itertools.product(scaling.scalings(), scaling.MODELS, (1, 8, 512)):
        batch = scaling.scalings()[kind][devices]
        times = scaling.computed(measured, model, batch, devices)
        shown = [times.compute, times.noise, times.reduction, times.step]
        line = " | ".join([f"| {batch:,}", *(f"{1e3 * each:,.0f}" for each in shown)])
        share = scaling.share_of_measured(times, model, batch / devices)
        is_left_out = model != "gpt2-small-512" and (kind == "weak" or devices == 1)
        assert (f"{line} | {share:.0%} |" in page) is not is_left_out
