"""SCAFFOLD and FedDyn against the same arithmetic written plainly, over several rounds in float64."""

import pytest

from tests.identities.plainly import (
    CLIENTS,
    EVERYONE,
    LR,
    ROUNDS,
    average,
    batches,
    check_close,
    initial,
    played,
    sampled,
    states,
    trained,
    zeros,
)

N = len(CLIENTS)


@pytest.mark.parametrize(
    ("participation", "rate"), [(1.0, 1.0), (0.5, 1.0), (0.5, 0.7)]
)
def test_scaffold_is_the_papers_option_two(participation, rate):
    """c_i+ = c_i - c + (x - y_i) / (K lr), c <- c + mean over all N, x <- x + rate mean over the sampled."""
    options = {"server_lr": rate}
    run = played("scaffold", ROUNDS, participation=participation, options=options)
    x, c, variates = initial(), zeros(), [zeros() for _ in EVERYONE]
    for index, checkpoint in enumerate(run.checkpoints):
        moved, changed = [], []
        for client in sampled(run, index):
            old, steps = variates[client], len(batches(client))
            y = trained(client, x, index, bend=lambda n, w: c[n] - old[n])  # noqa: B023
            variates[client] = {
                n: old[n] - c[n] + (x[n] - y[n]) / (steps * LR) for n in x
            }
            moved.append({n: y[n] - x[n] for n in x})
            changed.append({n: variates[client][n] - old[n] for n in x})
        step, part = average(moved, None), average(changed, None)
        x = {n: x[n] + rate * step[n] for n in x}
        c = {n: c[n] + len(changed) / N * part[n] for n in c}
        check_close(checkpoint.server.trees["model"], x)
        check_close(checkpoint.server.trees["variate"], c)
        for state, wanted in zip(states(run, index), variates, strict=True):
            check_close(state["variate"], wanted)
    assert any(value.abs().max() > 1e-3 for value in c.values())


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_feddyn_is_the_papers(alpha, participation):
    options = {"alpha": alpha}
    run = played("feddyn", ROUNDS, participation=participation, options=options)
    theta, s, pulls = initial(), zeros(), [zeros() for _ in EVERYONE]
    for index, checkpoint in enumerate(run.checkpoints):
        local = []
        for client in sampled(run, index):
            dual, start = pulls[client], theta
            pull = lambda n, w: alpha * (w - start[n]) - dual[n]  # noqa: B023, E731
            client_model = trained(client, start, index, bend=pull)
            local.append(client_model)
            pulls[client] = {
                n: dual[n] - alpha * (client_model[n] - start[n]) for n in client_model
            }
        mean = average(local, None)
        s = {n: s[n] - alpha * len(local) / N * (mean[n] - theta[n]) for n in s}
        theta = {n: mean[n] - s[n] / alpha for n in s}
        check_close(checkpoint.server.trees["model"], theta)
        for state, wanted in zip(states(run, index), pulls, strict=True):
            check_close(state["variate"], wanted)
