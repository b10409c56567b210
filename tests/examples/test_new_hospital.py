"""A hospital that comes later begins with the weights of the others."""

from examples import new_hospital
from fl_core.records import store


def test_a_new_hospital_begins_with_the_weights_of_the_others(tmp_path, capsys):
    scores = new_hospital.main(str(tmp_path))
    rows = store.Run(tmp_path / "others").rows()[1]
    assert set(rows["client"].dropna()) == {"cleveland", "hungarian", "switzerland"}
    shown = capsys.readouterr().out.splitlines()
    assert [line[-5:] for line in shown[:1]] == [" mean"]
    assert [line[-5:] for line in shown[1:]] == [
        f"{scores[name]:.3f}" for name in ("init", "fresh")
    ]
    assert scores["init"] != scores["fresh"]
