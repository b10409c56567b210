"""The first screen of a choice: each of its numbers against the stored models, its length, and its order."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file
from scipy.optimize import minimize
from scipy.special import log_softmax

import fedlayers as fl
from fedlayers.studies.arms import ENDS, FIRST, arms_of
from fedlayers.studies.first_screen import (
    DECIDED,
    NOTHING,
    UNDECIDED,
    UNSHOWN,
    Facts,
    Inference,
    first_screen,
)
from fl_core.layers import Layer
from fl_core.statistics import Interval, stratified_mean

CONFIG = fl.RunConfig(rounds=4, lr=0.01, client_column="ward", label_column="died")


def wards(signal, n=150):
    """Three wards with five columns, whose outcome follows their sum, and in one ward its opposite."""
    draw, parts = np.random.default_rng(0), []
    for k, name in enumerate(("a", "b", "c")):
        x = draw.normal(size=(n, 5))
        risk = signal * x.sum(1) * (-1 if k == 2 else 1) + draw.logistic(size=n)
        table = pd.DataFrame(x, columns=list("vwxyz")).round(4)
        parts.append(table.assign(ward=name, died=np.where(risk > 0, "yes", "no")))
    return pd.concat(parts, ignore_index=True)


def stored_losses(choice, name):
    """Return each test sample's loss, weight and client, of stored models by their own description."""
    folder = choice.run.parent.parent / "models"
    stored = json.loads((folder / f"{name}.json").read_text())
    about, found = stored["about"], []
    for k, client in enumerate(choice.task.data.clients):
        own = stored["clients"][client.name]
        weights = load_file(folder / f"{own['sha256']}.safetensors")
        model = fl.ExportedModel(folder / "none", about)
        from fl_core.run.exported_model import built_from

        built = built_from(folder, about, None, (), weights).eval()
        logits = built(client.test.x).detach().double().numpy()
        hot = logits / model.temperature + np.array(own["base_rate"])
        loss = -log_softmax(hot, axis=1)[np.arange(len(hot)), client.test.y.numpy()]
        weight = len(client.train) / len(loss)
        found.append(pd.DataFrame({"loss": loss, "weight": weight, "client": k}))
    return pd.concat(found, ignore_index=True)


def run_losses(choice, one):
    """Return each test sample's loss by a stored run and its own epochs, or by the base rate (None)."""
    clients, sizes = choice.task.data.clients, []
    logits, bases = [], []
    models = (
        None
        if one is None
        else fl.load_models(
            one.job.path, "best", "personal", data=choice.task.own["data"]
        )[0]
    )
    if one is not None and one.epochs:
        bench = choice.benches[one.seed]
        loaded = bench.load(one.job.path)
        tuner = bench.tuner(one.job, loaded)
        names = frozenset(dict(loaded.task.model.named_parameters()))
        for k, client in enumerate(clients):
            weights = tuner.tuned(k, names, one.rate, one.epochs)
            models[client.name].load_state_dict(weights)
    for split in ("validation", "test"):
        for client in clients:
            x, counts = client.split(split).x, np.bincount(client.train.y, minlength=2)
            base = np.log((counts + 1) / (counts.sum() + 2))
            bases.append(np.tile(base, (len(x), 1)))
            out = (
                bases[-1] if models is None else models[client.name].eval()(x).detach()
            )
            logits.append(np.asarray(out, float))
            sizes.append(len(x))
    n, half = len(clients), sum(sizes[: len(clients)])
    y = np.concatenate([c.split(s).y for s in ("validation", "test") for c in clients])
    train = np.array([len(client.train) for client in clients] * 2)
    weight = np.repeat(train / np.array(sizes), sizes)
    logits, bases = np.concatenate(logits), np.concatenate(bases)

    def losses(at):
        hot = log_softmax(at[0] * logits + at[1] * bases, axis=1)
        return -hot[np.arange(len(y)), y]

    margin = 1 / (weight[:half].sum() ** 2 / (weight[:half] ** 2).sum() + 2)

    def fitted(at):
        hot = log_softmax(at[0] * logits[:half] + at[1] * bases[:half], axis=1)
        label = hot[np.arange(half), y[:half]]
        soft = (1 - margin) * label + margin * (hot.sum(axis=1) - label)
        return -np.average(soft, weights=weight[:half])

    bounds = [(1e-12, 50), (0, 1)]
    best = minimize(
        fitted, [1.0, 0.0], method="Nelder-Mead", bounds=bounds, tol=1e-10
    ).x
    client = np.repeat(np.arange(n), sizes[n:])
    found = {"loss": losses(best)[half:], "weight": weight[half:], "client": client}
    return pd.DataFrame(found)


@pytest.mark.parametrize("signal", [1.0, 0.0])
def test_each_number_is_that_of_the_stored_models(signal, tmp_path):
    choice = fl.choose(CONFIG, tmp_path, data=wards(signal), progress=False)
    text = choice.answers.head
    assert len(text.split()) <= 60, text
    assert choice.text().startswith(text)
    assert len(set(re.split(r"(?<=\.) ", text))) == len(re.split(r"(?<=\.) ", text))
    facts, first = choice.facts, stored_losses(choice, "recommended")
    shown = {f"{facts.values[name]:.3f}" for name in facts.values}
    values = {"model": first}
    if facts.simple.startswith("linear"):
        values["simple"] = stored_losses(choice, facts.simple)
    values["base_rate"] = run_losses(choice, None)
    if "alone" in facts.values:
        alone = [one for one in choice.runs if one.arm == "nothing"]
        values["alone"] = run_losses(choice, alone[0])
    for name, own in values.items():
        mean = np.average(own["loss"], weights=own["weight"])
        near = 2e-4 if name == "base_rate" else 1e-5  # whose fit is flat
        assert facts.values[name] == pytest.approx(mean, abs=near), name
        if name == "model":
            continue
        gap = stratified_mean(
            (first["loss"] - own["loss"]).to_numpy(),
            first["weight"].to_numpy(),
            np.arange(len(first)),
            first["client"].to_numpy(),
        ).interval()
        if np.isnan(facts.above[name].low):  # both are the base rate
            assert np.abs(gap).max() < near, name
            continue
        assert facts.above[name] == pytest.approx(gap, abs=near), name
    for found in facts.above.values():
        shown |= {f"{abs(each):.3f}" for each in found}
    for line in choice.evidence.itertuples():
        shown |= {f"{abs(each):.3f}" for each in (line.difference, line.low, line.high)}
    numbers = re.findall(r"\d+\.\d{3}", text)
    assert numbers
    assert set(numbers) <= shown
    assert ("Undecided" in text) <= (choice.inference.verdict == UNDECIDED)
    if not signal:
        assert "base rate" in text.split(".")[0] or "simple model" in text
    useless = choice.inference.verdict in (NOTHING, UNSHOWN)
    assert choice.answers.useless == useless
    above = {**facts.above, "simple": Interval(0.1, -0.1, 0.3)}
    facts = replace(facts, simple="boosting_own", above=above)
    table = choice.evidence
    for value, step in (
        (0.0, "--baseline linear_own"),
        (9.0, "fedlayers check" if useless else "--out models"),
    ):
        loss = table["loss"].where(table["name"] != "linear_own", value)
        changed = replace(choice, facts=facts, evidence=table.assign(loss=loss))
        assert step in changed.next_step(tmp_path)


LAYERS = tuple(Layer(name, (f"{name}.weight",)) for name in ("fc1", "fc2", "fc3"))
ARMS = arms_of((*FIRST, *ENDS), LAYERS)
GAPS = pd.DataFrame(
    {"arm": ["nothing", "all"], "difference": -0.1, "low": -0.2, "high": -0.01}
).assign(p_value=0.01, excluded=True)


def said(verdict, simple=(-0.2, -0.3, -0.1), gain="gains", seeds=3):
    left = ("head_local",) if verdict == DECIDED else ("head_local", "all")
    race = Inference(verdict, left, GAPS, "loss", seeds)
    values = {"model": 0.5, "simple": 0.7, "alone": 0.6, "base_rate": 0.9}
    above = {"simple": Interval(*simple), "alone": Interval(-0.1, -0.2, -0.02)}
    above["base_rate"] = Interval(-0.4, -0.5, -0.3)
    names = {f"client {k}": gain for k in range(8)}
    kind = "classification"
    facts = Facts(
        "loss", kind, values, above, "linear_own", {"model": 0.8}, 20, 90, names
    )
    return first_screen(race, ARMS, "all", facts)


def test_the_order_is_base_rate_simple_model_undecided_arm():
    worse = (0.1, -0.1, 0.3)
    for verdict, how, begins in (
        (UNSHOWN, {"simple": worse}, "No network is shown to be better"),
        (UNDECIDED, {"simple": worse}, "A simple model is as good: use logistic"),
        (DECIDED, {"simple": (0.2, 0.1, 0.3)}, "A simple model is better"),
        (UNDECIDED, {"seeds": 1}, "Undecided, one seed: "),
        (DECIDED, {}, "Keep fc3 local and share fc1, fc2."),
    ):
        text = said(verdict, **how)
        assert text.startswith(begins), text
        assert len(text.split()) <= 60, text
    assert "0.100 lower than training alone [0.020, 0.200]" in said(DECIDED)
    assert "client 0, client 1, client 2 and 5 more" in said(DECIDED, gain="loses")
