"""Chapter 19: its figures, and that page and figures follow the model that ships."""

import copy
import json
import re
from importlib import resources
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from figures import check_figure, contents, html_of, said, shown

from transformer_lib.corpora import CorpusUnavailable
from transformer_lib.figures import shipped_model
from transformer_lib.runs import folder as folder_module
from transformer_lib.runs import read_evidence

LIBRARY = Path(str(resources.files("transformer_lib")))
PAGE = LIBRARY.parent / "notebooks/19_shipped_model.ipynb"
HOOD = LIBRARY.parent / "notebooks/under_the_hood/19_shipped_model.ipynb"
NEW = "tatoeba-en-de-typed"
FIGURES = [
    shipped_model.show_score,
    shipped_model.show_lengths,
    shipped_model.show_growth,
    shipped_model.show_choices,
    shipped_model.show_search,
    shipped_model.lines_figure,
]


def better(parts: dict, by: float) -> dict:
    """Scores of parts of the test set, so many points of BLEU higher."""
    return {
        group: row | {"BLEU": [value + by for value in row["BLEU"]]}
        for group, row in parts.items()
    }


@pytest.fixture
def another(tmp_path, monkeypatch):
    """A library that ships a model of another recipe, a point and a half better."""
    for path in LIBRARY.iterdir():
        if path.name not in ("evidence", "pretrained"):
            (tmp_path / path.name).symlink_to(path)
    folder = tmp_path / "evidence"
    (folder / "results").mkdir(parents=True)
    for path in (LIBRARY / "evidence").iterdir():
        if path.name not in ("results", "translator-test.json"):
            (folder / path.name).symlink_to(path)
    for path in (LIBRARY / "evidence/results").iterdir():
        if path.name not in ("robustness", "sealed"):
            (folder / "results" / path.name).symlink_to(path)
    model = tmp_path / "pretrained/tatoeba-en-de"
    model.mkdir(parents=True)
    for path in (LIBRARY / "pretrained/tatoeba-en-de").iterdir():
        (model / path.name).symlink_to(path)

    old = read_evidence(shipped_model.shipped_run())
    run = copy.deepcopy(old)
    run["recipe"] |= {"name": NEW, "start_from": ""}
    for row in (run["scores"], *run["choices"]):
        row["sacreBLEU"]["value"] += 1.5
    kept = read_evidence("translator-test")
    before = kept["runs"][-1]
    kept["runs"] = [*shipped_model.FIRST_RUNS, NEW]
    kept["copied"][NEW] = [150, 190]
    kept["scores"][NEW] = better(kept["scores"][before], 1.5)
    for row in kept["compared"]:
        row["second"] = row["second"].replace(before, NEW)
    lines = read_evidence(f"results/robustness/{before}")
    all_pass = [line | {"why_not": ""} for line in lines["lines"]]
    typed = lines | {"lines": all_pass, "kinds": dict.fromkeys(lines["kinds"], 1.0)}
    score = {"value": 31.2, "signature": "s"}
    sealed = {"pairs": 3000, "sacreBLEU": score, "interval": [30.1, 32.3]}
    sealed["kind"] = "sealed pairs"

    def write(record, *names):
        for name in names:
            path = folder / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_text(json.dumps(record), "utf-8")

    write(run, NEW)
    write(kept, "translator-test")
    first = f"results/robustness/{shipped_model.FIRST_RUNS[-1]}"
    for name in (first, f"results/sealed/{before}"):
        write(read_evidence(name), name)
    write(lines, f"results/robustness/{before}")
    write(typed | {"good": 1.0}, f"results/robustness/{NEW}")
    write(sealed, f"results/sealed/{NEW}")
    (model / "recipe.json").unlink()
    (model / "recipe.json").write_text(json.dumps(run["recipe"]), "utf-8")
    files = resources.files
    monkeypatch.setattr(
        "importlib.resources.files",
        lambda name: tmp_path if name == "transformer_lib" else files(name),
    )
    place = LIBRARY / "pretrained/tatoeba-en-de"  # the weights are those of today
    monkeypatch.setattr(folder_module, "find_pretrained", lambda name: place)


def test_figures_say_what_the_results_say():
    kept, parts = shipped_model.score_parts()
    assert kept["runs"][-1] == shipped_model.shipped_run()
    told = html_of(shipped_model.show_score())
    for row in parts.values():
        assert f"{row['BLEU'][0]:.1f}, between {row['BLEU'][1]:.1f}" in told
    lines = contents(shipped_model.lines_figure())["data"]["lines"]
    record = shipped_model.typed_lines()[shipped_model.shipped_run()]
    assert len(lines) == 200 and all(len(tried) == 2 for _, _, tried in lines)
    passed = sum(not tried[-1][1] for _, _, tried in lines)
    assert passed == round(200 * record["good"])


def test_page_and_figures_follow_another_model(another, capsys):
    """No cell of the page asserts a number of one model; sealed pairs have a place."""
    assert shipped_model.shipped_run() == NEW
    told = html_of(shipped_model.show_score())
    assert "sealed pairs, scored once (3,000): 31.2, between 30.1 and 32.3" in told
    figure = contents(shipped_model.lines_figure())
    assert figure["controls"]["model"]["choices"] == ["names", "robust-last", "typed"]
    assert figure["state"]["model"] == 2
    for show in FIGURES:
        assert html_of(show())
    assert "typed" in html_of(shipped_model.show_choices())
    names: dict = {"__name__": "__main__"}
    for cell in json.loads(PAGE.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "%pip" not in source:
            exec(compile(source, cell["id"], "exec"), names)
            plt.close("all")
    out = capsys.readouterr().out
    assert f"recipe       {NEW}" in out and "typed " in out and "BLEU   35.1" in out


def test_scores_of_an_older_model_are_refused(another, monkeypatch):
    old = shipped_model.FIRST_RUNS
    kept = {"runs": old, "scores": {}}
    monkeypatch.setattr(shipped_model, "read_evidence", lambda name: kept)
    with pytest.raises(ValueError, match=f"{NEW}.*translator_scores"):
        shipped_model.score_parts()


def unavailable(*_):
    raise CorpusUnavailable("no text in this test")


def test_what_is_under_the_hood_follows_another_model(another, monkeypatch, capsys):
    """But for the cells that ask the model itself."""
    monkeypatch.setattr("transformer_lib.corpora.load_corpus", unavailable)
    monkeypatch.setattr(folder_module, "load_corpus", unavailable)
    names: dict = {"__name__": "__main__"}
    for cell in json.loads(HOOD.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or "%pip" in source or "#| export" in source:
            continue
        if "again = translator(" in source:
            continue
        if "FIRST_RUNS" not in names and "print_runs" in source:
            names |= vars(shipped_model) | {"__name__": "__main__"}
        exec(compile(source, cell["id"], "exec"), names)
    assert re.search(r"\ntyped .* 35\.12 +150 of 190\n", capsys.readouterr().out)


def test_the_figure_of_the_lines_answers(browser, tmp_path):
    figure = shipped_model.lines_figure()
    marks = [(".passes", "backgroundColor"), (".fails", "borderTopColor")]
    check_figure(browser, tmp_path, figure, marks)
    record = shipped_model.typed_lines()[shipped_model.shipped_run()]
    with shown(browser, tmp_path, figure) as page:
        assert page.locator(".squares i").count() == 200
        good = page.locator(".squares .passes").count()
        assert good == round(200 * record["good"])
        assert said(page).startswith(f"{good} of 200 lines pass.")
        page.locator(".squares i").first.focus()
        line = record["lines"][0]
        assert line["en"] in said(page) and line["output"] in said(page)
        page.get_by_role("button", name="passing lines first").click()
        looks = [e.get_attribute("class") for e in page.locator(".squares i").all()]
        for row in range(10):
            some = looks[20 * row : 20 * row + 20]
            assert some == sorted(some, reverse=True)  # "passes" before "fails"
        assert looks.count("passes") == good


def test_the_figure_of_the_lines_shows_two_models(another, browser, tmp_path):
    with shown(browser, tmp_path, shipped_model.lines_figure()) as page:
        assert said(page).startswith("200 of 200 lines pass.")
        page.get_by_role("button", name="names").click()
        assert not said(page).startswith("200 of 200")
