"""Result lines as `run` writes them, without a run."""

from experiments.deep.settings import DeepSettings, point_id

SAMPLE = "a sample of something"


def metrics(loss: float | None, accuracy: float | None, parts=("test",)) -> dict:
    """Final metrics of both iterates; the averaged one is a little better."""
    return {
        f"{iterate}_{part}_{name}": None if value is None else round(value + shift, 6)
        for iterate, sign in (("last", 0.0), ("average", 1.0))
        for part in parts
        for name, value, shift in (
            ("loss", loss, -0.01 * sign),
            ("accuracy", accuracy, 0.01 * sign),
        )
    }


def line(
    settings: DeepSettings,
    seed: int = 1,
    *,
    kind: str = "final",
    loss: float | None = 1.0,
    accuracy: float | None = 0.5,
    label: str = "the published data",
    is_complete: bool = True,
    start: float = 1.5,
    num_private: int = 48_000,
    device: str = "gpu, NVIDIA H200",
) -> dict:
    """A result line of these settings; losses fall from 2 · loss to loss in five steps."""
    validation = kind == "sweep" or settings.dataset == "wikitext2"
    parts = (("validation",) if validation else ()) + (("test",) if kind == "final" else ())
    final = metrics(loss, accuracy, parts)
    shares = (2.0, 1.6, 1.3, 1.1, 1.0)
    curve = {
        name: [
            None if value is None else value * (share if "loss" in name else 1.2 - 0.2 * share)
            for share in shares
        ]
        for name, value in final.items()
    }
    data = {"label": label, "num_private": num_private}
    return {
        "id": point_id(settings, kind=kind, seed=seed, **data),
        "kind": kind,
        "config": settings.name,
        "settings": settings.identity(),
        "seed": seed,
        "data": {
            **data,
            "is_complete": is_complete,
            "num_public": 2000,
            "not_covered": ["vocabulary: read without noise"]
            if settings.dataset == "wikitext2"
            else [],
            **({"unknown_rate": {"test": 0.207}} if settings.vocabulary == "public" else {}),
        },
        "privacy": {
            "epsilon_rdp": 7.531,
            "epsilon_pld": 6.421,
            "delta": settings.delta,
            "noise_multiplier": settings.noise_multiplier or 0.77,
            "num_steps": 9600,
            "sampling_prob": 0.01,
            "adjacency": "zero-out",
            "unit": "example",
            "tuning_charged": False,
        },
        "warm_start": {} if settings.algorithm == "cold" else {"holdout_loss": start, "seconds": 3},
        "curve": {"step": [0, 2400, 4800, 7200, 9600], **curve},
        "final": final,
        "seconds": 40.0,
        "trained_together": 1,
        "made_by": {
            "packages": {"jax": "0.11.2"},
            "machine": {"cores": 16, "device": device},
        },
    }
