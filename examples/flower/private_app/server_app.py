"""The server: samples users, clips what they send, adds noise, mixes in public rows, reports."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import mirrordp
from mirrordp.integrations import flower
from private_app.task import PARAMS, accuracy, draw, loss_fn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rounds = int(config["rounds"])
    public, test = draw(40, seed=0), draw(2_000, seed=1)
    mechanism = mirrordp.Mechanism(
        sampling=mirrordp.PoissonSampling.for_batch_size(
            float(config["expected-users"]), num_examples=int(config["num-users"])
        ),
        l2_clip_norm=float(config["l2-clip-norm"]),
        noise_multiplier=float(config["noise-multiplier"]),
        num_steps=rounds,
        unit="user",
    )
    step = mirrordp.FederatedStep(loss_fn, mechanism, client_learning_rate=0.5)
    strategy = flower.PrivateStrategy(
        step,
        PARAMS,
        delta=float(config["delta"]),
        public=mirrordp.PublicData(public),
        alpha=mirrordp.schedules.cosine(decay_steps=3 * rounds / 2),
        participation_is_seen=bool(config["participation-is-seen"]),
        reply_timeout=float(config["reply-timeout"]),
    )
    params = strategy.run(grid)
    report = strategy.report(
        title="Logistic regression, trained with Flower",
        results={"accuracy_on_public_test_rows": accuracy(params, test)},
    )
    report.write(str(config["report-directory"]))
    print(f"accuracy on public test rows: {accuracy(params, test):.3f}")
