"""Two CSV files in, a private model and its privacy card out: `mirrordp fit`, `mirrordp predict`.

The tables are generated, so that the example needs no download. On real data leave --seed out: a
run that can be repeated is not for release.
"""

import csv
import tempfile
from pathlib import Path

import numpy as np

from mirrordp import cli

rng = np.random.default_rng(0)


def write_table(path, rows):
    """Writes flats with a size that is sometimes missing, a district and a price."""
    size, district = rng.uniform(20, 120, rows), rng.choice(["north", "south", "west"], rows)
    price = 3 * size + 80 * (district == "west") + rng.normal(0, 20, rows)
    known = np.where(rng.random(rows) < 0.05, "", [f"{value:.1f}" for value in size])
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "district", "price"])
        writer.writerows(zip(known, district, np.round(price, 1), strict=True))
    return price


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_table(folder / "private.csv", 5_000)
    write_table(folder / "public.csv", 200)
    prices = write_table(folder / "new.csv", 1_000)

    fit = (
        f"fit --private {folder}/private.csv --public {folder}/public.csv --target price "
        f"--task regression --epsilon 1 --delta 1e-5 --out {folder}/model --seed 0"
    )
    assert cli.main(fit.split()) == 0
    predict = f"predict --model {folder}/model --input {folder}/new.csv --output {folder}/out.csv"
    assert cli.main(predict.split()) == 0

    with open(folder / "out.csv", newline="") as file:
        predicted = np.array([float(row["prediction"]) for row in csv.DictReader(file)])
    card = (folder / "model" / "privacy_card.md").read_text()

error = np.sqrt(np.mean((predicted - prices) ** 2))
print(f"Root mean squared error {error:.1f}; the prices themselves vary by {prices.std():.1f}.")
assert error < 0.4 * prices.std()
assert "epsilon" in card
assert "not for release" in card
