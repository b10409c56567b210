"""The seconds of a report of pytest are summed by folder, file and function."""

from __future__ import annotations

from pathlib import Path

from benchmarks import suite

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.fl_core.test_a" name="test_x[1]" time="1.5"/>
<testcase classname="tests.fl_core.test_a" name="test_x[2]" time="2.5"/>
<testcase classname="tests.fl_core.test_b.TestAll" name="test_y" time="0.25"/>
</testsuite></testsuites>"""


def test_cases_of_one_function_are_summed(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(REPORT)
    found = suite.times(tmp_path / "tests.xml")
    assert found.groupby("test")["seconds"].sum().to_dict() == {
        "tests.fl_core.test_a::test_x": 4.0,
        "tests.fl_core.test_b::test_y": 0.25,
    }
    assert set(found["folder"]) == {"tests.fl_core"}
    text = suite.tables(found, rows=1)
    assert text.startswith("3 tests, 4 seconds")
    assert "test_y" not in text
