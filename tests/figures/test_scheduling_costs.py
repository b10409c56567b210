"""Layer scheduling before training: the paper's counts come out exactly, of the committed rows."""

from figures.scheduling import costs


def test_stored_rows_have_the_papers_numbers():
    _, frame = costs.STUDY.read(costs.STUDY.path())
    total = costs.sizes(frame).loc["total"]
    assert total.tolist() == [582_026, 878_538, 924_708]
    published = costs.totals(frame).dropna(subset="published")
    assert published["naive"].round(2).tolist() == published["published"].tolist()
