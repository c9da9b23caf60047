"""The page in a real browser: no request, no error, and what hover and clicks show."""

import base64
import io
import re
import warnings
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from tasks.look.figures import (
    draw_heads,
    draw_matrix,
    draw_pictures,
    draw_token_lines,
    draw_tokens,
    save_figures,
)
from tasks.look.page import render
from tasks.look.views import Curves, Heads, Matrix, Sample, Table, Tokens, View
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.command import Console
from tests.helpers.page import content, tab_views, unpacked
from tests.helpers.tiny_models import close

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium"
)
WORDS = ["the", "cat", "</script>", "sat"]


def views(layers: int = 2, heads: int = 3, size: int = 4) -> dict[str, list[View]]:
    """One view of each kind."""
    weights = torch.rand(2, layers, heads, size, size).softmax(-1)
    words = WORDS if size == 4 else [f"word {number}" for number in range(size)]
    image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    return {
        "attention": [Heads("text", weights, words, words, ["step 1", "step 2"])],
        "picture": [Heads("image", weights[:1], words, words, image=image, grid=(2, size // 2))],
        "numbers": [
            Matrix("matrix", weights[0, 0, 0] - 0.25, words, words, "from", "to", diverging=True),
            Matrix("lens", weights[0, 0, 0], words, words, "from", "to", cells=[words] * size),
            Curves("curves", [1, 2], {"a": [0.5, 1.0], "b": [2.0, 0.0]}, "step", "value"),
        ],
        "texts": [
            Tokens("losses", words, [None, *range(1, size)], "nats"),
            Table("table", ("token", "p"), [["the", 0.25], ["<b>", 1e-6]]),
        ],
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.slow
@needs_browser
def test_the_page_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    tabs = views()
    page = tmp_path / "look.html"
    page.write_text(render("A <page>", "note", [Sample("one", tabs)] * 2, {"more": tabs["texts"]}))
    browser.open(page)
    assert browser.evaluate("document.title") == "A <page>"
    (heads,) = tabs["attention"]
    assert isinstance(heads, Heads)
    chosen = "document.querySelector('.chosen').textContent"
    assert browser.evaluate(chosen) == "layer 0, head 0"
    browser.mouse(".grid", 0.9, 0.9, click=True)
    assert browser.evaluate(chosen) == "layer 1, head 2"
    read = browser.evaluate("document.querySelector('.read').textContent")
    assert "rows are queries" in read and "columns are keys" in read
    browser.mouse(".large canvas", 0.94, 0.9)  # the last key, of the last query
    read = browser.evaluate("document.querySelector('.read').textContent")
    weight = float(heads.weights[1, 1, 2, 3, 3])
    assert read.startswith("sat → sat: ")
    assert float(re.findall(r"[\d.]+", read)[0]) == pytest.approx(weight, abs=0.005)
    tip = browser.evaluate("document.getElementById('tip').textContent")
    assert read.startswith(tip)
    slider = "document.querySelector('input[type=range]')"
    browser.evaluate(f"{slider}.value = 0; {slider}.oninput()")
    browser.mouse(".large canvas", 0.94, 0.9)
    read = browser.evaluate("document.querySelector('.read').textContent")
    weight = float(heads.weights[0, 1, 2, 3, 3])
    assert float(re.findall(r"[\d.]+", read)[0]) == pytest.approx(weight, abs=0.005)
    browser.evaluate("[...document.querySelectorAll('.bar button')].at(-1).click()")  # lines
    browser.mouse(".large canvas", 0.1, 0.3)
    assert browser.evaluate("document.querySelector('.read').textContent").startswith("the most to")
    browser.tab("picture")
    browser.mouse(".large canvas", 0.1, 0.2)  # the first patch
    assert browser.evaluate("document.querySelector('.read').textContent").startswith("the most to")
    browser.tab("numbers")
    browser.mouse("section canvas", 0.97, 0.95)
    tip = browser.evaluate("document.getElementById('tip').textContent")
    assert tip.startswith("from sat, to sat: ")
    for tab in ("texts", "more"):
        browser.tab(tab)
        text = browser.evaluate("document.querySelector('main').textContent")
        assert "</script>" in text and "<b>" in text
    requests = [url for url in browser.requests() if not url.startswith("data:")]
    assert requests[-1] == page.as_uri() and all(url.endswith("/look.html") for url in requests)
    assert browser.errors() == []


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (5, 5), (4, 5)])
def test_attention_over_the_picture(
    queries: int, keys: int, tmp_path: Path, browser: Browser
) -> None:
    """Patches are the last queries and keys; tokens of classes or of a start come before them."""
    patches = torch.zeros(4, 4)
    patches[range(4), [2, 3, 1, 0]] = 1
    weights = F.pad(patches, (keys - 4, 0, queries - 4, 0))[None, None, None]
    names = [f"token {number}" for number in range(5)]
    image = torch.zeros(1, 8, 8, dtype=torch.uint8)
    view = Heads("image", weights, names[:queries], names[:keys], image=image, grid=(2, 2))
    page = tmp_path / "look.html"
    page.write_text(render("picture", "", [Sample("one", {"attention": [view]})], {}))
    browser.open(page)
    drawn = "document.querySelector('.large canvas').toDataURL()"
    for patch, brightest in enumerate((2, 3, 1, 0)):
        row, column = divmod(patch, 2)
        browser.mouse(".large canvas", 0.12 + 0.24 * column, 0.25 + 0.45 * row)
        png = base64.b64decode(browser.evaluate(drawn).partition(",")[2])
        red = Image.open(io.BytesIO(png)).convert("RGB").getchannel(0)
        places = [(364 + 170 * x + 85, 22 + 170 * y + 85) for y in (0, 1) for x in (0, 1)]
        shades = [red.getpixel(place) for place in places]
        assert shades.index(max(shades)) == brightest and max(shades) > 200
    assert browser.errors() == []


@pytest.mark.slow
@needs_browser
def test_a_large_page_is_small_and_fast(tmp_path: Path, browser: Browser) -> None:
    scores = torch.randn(1, 12, 12, 512, 512)
    causal = torch.ones(512, 512, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    words = [f"word {number}" for number in range(512)]
    page = tmp_path / "look.html"
    tabs: dict[str, list[View]] = {"attention": [Heads("text", weights, words, words)]}
    with pytest.warns(UserWarning) as warned:
        page.write_text(render("large", "", [Sample("one", tabs)], {}))
    assert page.stat().st_size < 10_000_000
    (remark,) = (str(one.message) for one in warned)
    (view,) = tab_views(content(page))["attention"]
    assert (unpacked(view) - weights).abs().max() <= float(re.findall(r"0\.\d+", remark)[0])
    browser.open(page)
    assert remark in browser.evaluate("document.querySelector('header').textContent")
    browser.mouse(".grid", 0.95, 0.95, click=True)
    assert browser.evaluate("document.querySelector('.chosen').textContent") == "layer 11, head 11"
    frames = "new Promise(done => requestAnimationFrame(() => done(performance.now())))"
    button = "[...document.querySelectorAll('.bar button')].find(one => one.textContent === {!r})"
    height = 20 + 19 * 512 + 4  # of the lines: a title, a row for each word, a margin
    rows = [(20 + 19 * (step + 0.5)) / height for step in range(20)]  # the first
    for mode, points, last in (
        ("matrix", [(0.16 + 0.04 * step, 0.5) for step in range(20)], "word 21"),
        ("lines", [*zip([0.9, 0.1] * 10, rows, strict=True)], "word 19 most to "),  # keys, queries
    ):
        browser.evaluate(f"{button.format(mode)}.click()")
        start = browser.evaluate(frames)
        for x, y in points:
            browser.mouse(".large canvas", x, y)
        assert browser.evaluate(frames) - start < 20 * 120  # ms
        read = browser.evaluate("document.querySelector('.read').textContent")
        assert read.startswith(last)


@pytest.mark.slow
@needs_browser
def test_the_last_of_quick_clicks_counts(tmp_path: Path, browser: Browser) -> None:
    """Also while the weights of another tab are unpacked."""
    weights = torch.rand(1, 4, 4, 256, 256)
    words = [f"word {number}" for number in range(256)]
    tabs: dict[str, list[View]] = {
        "texts": [Table("table", ("token",), [["the"]])],
        "attention": [Heads(f"text {number}", weights, words, words) for number in range(2)],
    }
    page = tmp_path / "look.html"
    page.write_text(render("quick", "", [Sample("one", tabs)], {}))
    browser.open(page)
    titles = "[...document.querySelectorAll('h2')].map(title => title.textContent)"
    for names, expected in (
        (("attention", "texts"), ["table"]),
        (("attention", "texts", "attention", "attention"), ["text 0", "text 1"]),
    ):
        buttons = "[...document.querySelectorAll('nav button')]"
        clicks = [f"{buttons}.find(one => one.textContent === {name!r}).click()" for name in names]
        browser.evaluate("; ".join(clicks))
        browser.evaluate("new Promise(done => setTimeout(done, 1500))")
        assert browser.evaluate(titles) == expected
        assert browser.evaluate("document.body.dataset.ready") == names[-1]
    assert browser.errors() == []


def test_axes_of_attention_are_named() -> None:
    for heads in (1, 3):
        (view,) = views(layers=heads, heads=heads)["attention"]
        assert isinstance(view, Heads)
        figure = draw_heads(view)
        assert (figure.get_supylabel(), figure.get_supxlabel()) == ("queries", "keys")


def test_a_page_that_is_too_large_says_so(tmp_path: Path) -> None:
    page = tmp_path / "look.html"
    rows = [["x" * 1_000_000]] * 11
    with pytest.warns(UserWarning) as warned:
        page.write_text(
            render("large", "", [Sample("one", {"texts": [Table("none", ("a",), rows)]})], {})
        )
    assert content(page)["remarks"] == [str(one.message) for one in warned]
    assert "11 MB" in content(page)["remarks"][-1]


def test_a_small_page_shows_all_weights(tmp_path: Path) -> None:
    page = tmp_path / "look.html"
    tabs = views()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page.write_text(render("small", "", [Sample("one", tabs)], {}))
    assert content(page)["remarks"] == []
    (heads,) = tabs["attention"]
    (view,) = tab_views(content(page))["attention"]
    assert isinstance(heads, Heads)
    close(unpacked(view), heads.weights, atol=0.005)


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    tabs: dict[str, list[View]] = {
        "numbers": [
            Matrix("matrix", torch.tensor([[nan, 1.0]]), "a", "bc", "", "", limits=(0.0, nan)),
            Tokens("losses", ["a", "b", "c"], [None, 0.5, inf], "nats"),
            Table("table", ("token", "p"), [["the", nan], ["a", 0.123456789]]),
        ]
    }
    page = tmp_path / "look.html"
    page.write_text(render("nan", "", [Sample("one", tabs)], {}))
    matrix, tokens, table = tab_views(content(page))["numbers"]
    assert matrix["values"] == [[None, 1.0]] and matrix["limits"] is None
    assert tokens["values"] == [None, 0.5, None]
    assert table["rows"] == [["the", None], ["a", 0.123456789]]


def test_the_page_itself_is_small() -> None:
    page = render("empty", "", [Sample("one", {"texts": [Table("none", ("a",), [])]})], {})
    assert len(page) < 300_000
    assert not re.search(r"https?://|src=|@import|fetch\(|XMLHttpRequest", page)


def test_tokens_do_not_cover_each_other() -> None:
    tokens = ["=" * 50, "a"] * 8
    figure = draw_tokens(Tokens("losses", tokens, [1.0] * 16, "nats"))
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert all(box.x1 < figure.bbox.x1 for box in boxes)
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)


def test_a_long_matrix_of_tokens_shows_all_of_them() -> None:
    words = [f"word {number}" for number in range(45)]
    figure = draw_matrix(Matrix("lens", torch.rand(2, 45), "01", words, "", "", cells=[words] * 2))
    shown = [label.get_text() for axis in figure.axes[:3] for label in axis.get_xticklabels()]
    assert shown == words
    assert len([text for axis in figure.axes for text in axis.texts]) == 2 * 45


def test_attention_over_a_picture_is_that_of_the_page() -> None:
    (view,) = views(layers=1, heads=2)["picture"]
    assert isinstance(view, Heads)
    figure = draw_pictures(view)
    for head in range(2):
        _, heat = figure.axes[head].images
        close(torch.tensor(heat.get_array()).flatten(), view.weights[0, 0, head].mean(0))


def test_lines_between_tokens_are_the_weights() -> None:
    view = Heads("self", torch.tensor([[[[[0.9, 0.1], [0.02, 0.98]]]]]), ["a", "b"], ["c", "d"])
    figure = draw_token_lines(view)
    (lines,) = figure.axes[0].collections
    assert [path.vertices.tolist() for path in lines.get_paths()] == [
        [[0, 0], [1, 0]],
        [[0, 0], [1, 1]],
        [[0, 1], [1, 1]],  # not b to c: too little
    ]
    close(torch.tensor(lines.get_alpha()).float(), torch.tensor([0.9, 0.1, 0.98]))
    left, right = ([label.get_text() for label in axis.get_yticklabels()] for axis in figure.axes)
    assert left == ["a", "b"] and right == ["c", "d"]


def test_a_head_that_attends_everywhere_alike_has_no_lines() -> None:
    """Each of 25 weights is 0.04."""
    tokens = [*"abcdefghijklmnopqrstuvwxy"]
    figure = draw_token_lines(Heads("self", torch.full((1, 1, 1, 25, 25), 0.04), tokens, tokens))
    assert not figure.axes[0].collections


@pytest.mark.slow
def test_figures_for_papers(tmp_path: Path) -> None:
    found = save_figures(views(), tmp_path)
    assert len(found) == 9 and tmp_path / "picture-image-picture.svg" in found
    for path in found:
        assert path.read_text().rstrip().endswith("</svg>")
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [1, 9])
def test_figures_of_each_input(count: int, runs: Path, console: Console) -> None:
    """Numbered if there are several; at most of 8."""
    texts = " ".join(f"--text '{word} film'" for word in "abcdefghi"[:count])
    line = f"look --ckpt_path {runs}/bert/checkpoints/best.ckpt {texts} --effects false"
    out, _ = console.printed(f"{line} --output out", "bert")
    names = sorted(path.name for path in Path("out").glob("*prediction-prediction.svg"))
    if count == 1:
        assert names == ["prediction-prediction.svg"] and "of the first" not in out
    else:
        assert names == [f"{number}-prediction-prediction.svg" for number in range(1, 9)]
        assert "the first 8 of 9 inputs" in out
        texts_drawn = {Path("out", name).read_text() for name in names}
        assert len(texts_drawn) == 8
