"""FedPFT and its two-stage baseline: who learns from what, MoCo's queue, what stays, what is recorded."""

from dataclasses import replace

import pytest
import torch

from fl_core import runner, tree
from fl_core.algorithms import Round, find
from fl_core.algorithms.fedpft import SETTINGS, ContrastiveBatch, FedPFT
from fl_core.client_runner import Part, TrainRequest
from fl_core.errors import UsageError
from tests.conftest import CONFIG, TOY, client_runner_of, network, play

HARD = {"momentum": 0.9, "weight_decay": 0.05}
PARTS = ("body", "transform", "head", "projection", "prompts", "contrast_prompts")


def client_runner(algorithm="fedpft", kind="norm", **options):
    task = runner.assemble(
        CONFIG.with_keys(algorithm=algorithm, epochs=2, options=options),
        data=TOY,
        model=network(kind),
    )
    found = client_runner_of(task)
    found.algorithm = task.algorithm(task.plan)
    return found


def job(where, client=1, index=0):
    algorithm, initial = where.algorithm, tree.state_dict(where.workspace.model)
    assert algorithm is not None
    rnd = Round(index, "train", (client,))
    message = algorithm.server_message(
        algorithm.server_state(tree.clone(initial)), client, rnd
    ).clone()
    return TrainRequest(
        client, rnd, message, state=algorithm.client_state(initial, client), keep=True
    )


ROUTES = {  # phase -> part -> the losses that move it (FedPFT, Eq. 5 and 6)
    "features": {
        "body": "K",
        "transform": "CK",
        "head": "",
        "projection": "K",
        "prompts": "C",
        "contrast_prompts": "",
    },
    "adapt": {
        "body": "C",
        "transform": "C",
        "head": "C",
        "projection": "",
        "prompts": "",
        "contrast_prompts": "K",
    },
    "train": {
        "body": "CK",
        "transform": "CK",
        "head": "C",
        "projection": "K",
        "prompts": "C",
        "contrast_prompts": "K",
    },
}


@pytest.mark.parametrize("phase", ROUTES)
def test_gradients_go_where_the_paper_sends_them(phase, monkeypatch):
    """The two losses alone, by scaling the other one to nothing, for all six parts."""
    where = client_runner(alternate=phase != "train")
    algorithm = where.algorithm
    assert isinstance(algorithm, FedPFT)
    chosen = next(each for each in algorithm.phases(Round(0), 1) if each.name == phase)
    found = dict.fromkeys(PARTS, "")
    for letter, silent in (("C", "contrast_loss"), ("K", "classify")):
        reached = {}

        def note(
            steps,
            batch,
            ctx,
            reached=reached,
        ):
            seen = algorithm.draw_views(steps, batch, ctx)
            for name, grad in steps.gradients(seen).items():
                part = name.partition(".")[0]
                reached[part] = max(reached.get(part, 0.0), float(grad.abs().max()))
            algorithm.enqueue(
                seen, ctx
            )  # the first batch has no negatives, and so no gradient

        with monkeypatch.context() as patch:
            loss = getattr(FedPFT, silent)
            patch.setattr(FedPFT, silent, lambda *a, loss=loss, **k: 0 * loss(*a, **k))
            algorithm.note = note
            ctx = where._context(algorithm, 1, 0, {})
            ctx.trees = job(where).state.trees
            where.phase(
                Part(
                    replace(chosen, step="note"),
                    tree.state_dict(where.workspace.model),
                    ctx,
                    {},
                )
            )
        for part, size in reached.items():
            found[part] += letter * (size > 0)
    assert found == ROUTES[phase]
    assert {name.partition(".")[0] for name in chosen.train} == {
        part for part in PARTS if ROUTES[phase][part]
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_ablation(setting):
    """Prompts, alternating, contrastive task, and prompts for it: FedPFT, Table 3."""
    ticks = {
        "I": "",
        "II": "p",
        "III": "pa",
        "IV": "pac",
        "V": "pacq",
        "VI": "c",
        "VII": "pc",
        "VIII": "pcq",
    }
    played = play(
        algorithm="fedpft", options=SETTINGS[setting] | {"queue": 32}, rounds=1
    )
    parts = {name.partition(".")[0] for name in played.engine.task_info.tensors}
    variants = {r["variant"] for r in played.rows if r["metric"] == "train_loss"}
    found = (
        "p" * ("prompts" in parts)
        + "a" * ("adapt" in variants)
        + "c" * ("projection" in parts)
    )
    assert found + "q" * ("contrast_prompts" in parts) == ticks[setting]
    assert any(name.endswith("/contrast") for name in variants) == (
        "c" in ticks[setting]
    )


def test_epochs_are_divided_between_the_phases():
    def epochs(total, **options):
        task = runner.assemble(
            CONFIG.with_keys(algorithm="fedpft", epochs=total, options=options),
            data=TOY,
            model=network("plain"),
        )
        return [phase.epochs for phase in task.algorithm(None).phases(Round(0), 0)]

    assert [epochs(n) for n in (1, 2, 3, 5, 10)] == [
        [1, 1],
        [1, 1],
        [2, 1],
        [4, 1],
        [8, 2],
    ]
    assert epochs(5, feature_epochs=3) == [3, 2]
    assert epochs(5, feature_epochs=0) == [0, 5]
    assert epochs(5, alternate=False) == [5]


def test_the_attention_learns_at_its_own_rate():
    """The paper's 0.01 and 0.05 beside 0.1 for all else."""
    for options, rate, slower in (
        ({}, None, 10),
        ({"contrast": False}, None, 2),
        ({"transform_lr": 0.3}, 0.3, 10),
    ):
        algorithm = client_runner(**options).algorithm
        assert algorithm is not None
        for phase in algorithm.phases(Round(0), 0):
            (group,) = phase.groups
            assert (group.lr, group.lr_divisor, phase.lr) == (rate, slower, None)
            assert {name.partition(".")[0] for name in group.train} == {"transform"}


def test_what_does_not_fit_is_refused():
    config = CONFIG.with_keys(batch_size=16)
    for algorithm in ("fedpft", "two_stage"):
        with pytest.raises(UsageError, match=rf"{algorithm}.*images.*contrast=false"):
            runner.assemble(config.with_keys(dataset="heart", algorithm=algorithm))
    for options, message in (
        ({"heads": 5}, "heads.*6.*5"),
        ({"prompt": 3}, "'prompt'.*'prompts'"),
        ({"feature_epochs": 3}, "feature_epochs.*2.*3"),
    ):
        with pytest.raises(UsageError, match=message):
            client_runner(kind="plain", **options)
    problem = replace(client_runner("two_stage").algorithm.task_info, rounds=0)
    with pytest.raises(UsageError, match="stage_rounds"):
        find("two_stage")(problem)
    assert find("two_stage")(problem, None, {"stage_rounds": 4}).first(Round(3))


def watched(where, **changes):
    """The batches that a client's training saw, the queue after each, and the result."""
    seen = []
    queues = []
    algorithm = where.algorithm
    assert isinstance(algorithm, FedPFT)
    enqueue = algorithm.enqueue

    def spy(each, ctx):
        enqueue(each, ctx)
        seen.append(each)
        queues.append(tree.clone(ctx.scratch["queue"]))

    algorithm.enqueue = spy
    return seen, queues, where.run(job(where, **changes))


def test_the_queue_holds_the_latest_keys_wherever_it_wraps():
    where = client_runner(queue=21)  # of batches of 8, and of a last one of 5
    began = job(where).state.trees["queue"]["keys"]
    seen, queues, result = watched(where)
    keys = torch.cat([each.keys for each in seen])
    torch.testing.assert_close(keys.norm(dim=1), torch.ones(len(keys)))
    ring, at = began.clone(), 0
    for each, queue in zip(seen, queues, strict=True):
        for key in each.keys:
            ring[at % 21] = key
            at += 1
        assert torch.equal(queue["keys"], ring)
        assert int(queue["at"]) == at % 21
        assert int(queue["filled"]) == min(at, 21)
    assert at % 21
    assert torch.equal(result.state.trees["queue"]["keys"], ring)
    assert result.state.trees.keys() == {"model", "queue"}, "the key branch is not kept"
    assert not any(each.keys.requires_grad for each in seen)


def test_the_contrastive_loss_is_a_softmax_over_the_queue():
    where = client_runner(queue=30, temperature=0.2)
    algorithm, space = where.algorithm, where.workspace
    assert isinstance(algorithm, FedPFT)
    draw = torch.Generator().manual_seed(0)
    keys, own = (
        torch.nn.functional.normalize(torch.randn(n, 128, generator=draw))
        for n in (30, 4)
    )
    ctx = where._context(algorithm, 0, 0, {})
    ctx.scratch["queue"] = {
        "keys": keys,
        "at": torch.tensor(11),
        "filled": torch.tensor(11),
    }
    x, y = TOY.clients[0].train.x[:4], TOY.clients[0].train.y[:4]
    space.model.eval()
    found = algorithm.contrast_loss(
        space.params, ContrastiveBatch(x, y, x, own, {}), ctx
    )
    with torch.no_grad():
        queries = space.model(x, task="contrast").double()
    torch.testing.assert_close(queries.norm(dim=1), torch.ones(4, dtype=torch.float64))
    total = 0.0
    for q, k in zip(queries, own.double(), strict=True):
        others = [float(torch.exp(q @ other.double() / 0.2)) for other in keys[:11]]
        right = float(torch.exp(q @ k / 0.2))
        total -= float(torch.log(torch.tensor(right / (right + sum(others)))))
    assert found.item() == pytest.approx(total / 4, rel=1e-5)


def test_the_key_branch_follows_the_query_branch():
    """It starts at what was received, and each step moves it by 1 - m towards the query branch before it encodes."""
    where = client_runner(queue=16, momentum=0.9, kind="plain")
    algorithm = where.algorithm
    assert isinstance(algorithm, FedPFT)
    start = {name: value.clone() for name, value in where.workspace.live.items()}
    wanted = {}
    seen_step = algorithm.draw_views

    def spy(steps, batch, ctx):
        wanted.update(
            {
                n: 0.9 * wanted.get(n, steps.live[n].detach())
                + 0.1 * steps.live[n].detach()
                for n in steps.live
            }
        )
        found = seen_step(steps, batch, ctx)
        for name, value in ctx.scratch["key"].items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-7)
        return found

    algorithm.draw_views = spy
    where.run(job(where))
    assert any(
        not torch.allclose(wanted[name], start[name], atol=1e-4) for name in start
    )


def test_prompts_stay_with_their_client_and_begin_differently():
    options = {"queue": 32, "personal_head": True}
    played = play(
        algorithm="fedpft", options=options, participation=0.5, model="norm", **HARD
    )
    start, algorithm = tree.state_dict(played.task.model), played.engine.algorithm
    stays = {"prompts", "contrast_prompts", "head.weight", "head.bias"}
    first = [
        algorithm.client_state(start, c).trees["model"] for c in range(len(TOY.clients))
    ]
    assert all(own.keys() == stays for own in first)
    prompts = {tree.digest(tree.select(own, ["prompts"])) for own in first}
    assert len(prompts) == len(first)
    drawn = torch.stack([own["contrast_prompts"] for own in first])
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.1)
    last = played.checkpoints[-1]
    found = [
        algorithm.models(last.server, state, Round(3))["personal"]
        for state in last.clients.values()
    ]
    for name in start:
        same = all(torch.equal(found[0][name], other[name]) for other in found[1:])
        assert same == (name not in stays), name
        kept = torch.equal(last.server.trees["model"][name], start[name])
        assert kept or name not in stays


def sizes(played, *parts):
    model = tree.state_dict(played.task.model)
    return sum(
        4 * t.numel()
        for n, t in model.items()
        if n.partition(".")[0] in parts and t.is_floating_point()
    )


def test_two_stages_train_and_send_their_own_parts():
    options = {"queue": 32, "stage_rounds": 2}
    played = play(
        algorithm="two_stage", options=options, rounds=4, participation=0.5, **HARD
    )
    parts = {False: ("body", "projection"), True: ("body", "transform", "head")}
    for metric in ("bytes_down", "bytes_up"):
        sent = {(k > 2, v) for (k, _), v in played.values(metric).items()}
        assert sent == {(second, sizes(played, *parts[second])) for second in parts}
    before = tree.state_dict(played.task.model)
    for checkpoint in played.checkpoints:
        server = checkpoint.server.trees["model"]
        changed = [n for n in server if not torch.equal(server[n], before[n])]
        moved = {name.partition(".")[0] for name in changed}
        assert moved == set(parts[checkpoint.round > 2])
        before = server
        for state in checkpoint.clients.values():
            rnd = Round(checkpoint.round)
            model = played.engine.algorithm.models(checkpoint.server, state, rnd)
            shared = [name for name in model["personal"] if name != "prompts"]
            own = tree.digest(tree.select(model["personal"], shared))
            assert own == tree.digest(tree.select(server, shared))
    last = played.checkpoints[-1].models["local"].values()
    prompts = {tree.digest(tree.select(local, ["prompts"])) for local in last}
    assert len(prompts) == len(last)
    losses = [r for r in played.rows if r["metric"] == "train_loss"]
    assert {(r["round"] > 2, r["variant"]) for r in losses} == {
        (False, "contrast"),
        (False, "contrast/contrast"),
        (True, "train"),
        (True, "train/classify"),
    }


def test_attention_is_recorded_after_the_last_round():
    options = {"queue": 32, "attention": 4, "heads": 2}
    played = play(algorithm="fedpft", options=options, model="norm", rounds=2)
    rows = [r for r in played.rows if r["metric"] == "prompt_attention"]
    assert {r["round"] for r in rows} == {2}
    found = {(r["client"], r["layer"], r["variant"]): r["value"] for r in rows}
    assert len(found) == len(rows)
    last, model = played.checkpoints[-1], played.task.model
    for client, own in zip(TOY.clients, last.clients.values(), strict=True):
        personal = played.engine.algorithm.models(last.server, own, Round(2))
        tree.load(model, personal["personal"])
        with torch.no_grad():
            wanted = model.eval().attention(client.test.x[:4])
        for layer, table in wanted.items():
            assert table.sum(1).tolist() == pytest.approx([1] * len(table), abs=1e-5)
            for k, row in enumerate(table):
                for j, value in enumerate(row):
                    to = f"prompt {j}" if j else "feature"
                    variant = f"sample {k + 1}>{to}"
                    mine = found.pop((client.name, layer, variant))
                    assert mine == pytest.approx(float(value), abs=1e-6)
    assert not found
