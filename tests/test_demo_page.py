"""The Space's page as HTML: what it says is the trace's, what comes from outside is escaped, and marks are not text."""

import copy
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from demo_pair import TEXT, ready, tiny_pair, writing_pair

import page
from answer import Answer
from blockpilot_hf.display import are_accepted
from request import FIXED, IN_FLIGHT, PAPER, Limits, Request
from session import Session

STYLE = (Path(page.__file__).parent / "style.css").read_text(encoding="utf-8")


class Parsed(HTMLParser):
    """Text by element id and by class, attributes of all elements."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.elements = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in ("rect", "circle", "path", "use", "td", "th", "br"):
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()["tag"] != tag:
            pass

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def of_class(self, name):
        return [e for e in self.elements if name in (e.get("class") or "").split()]

    def by_id(self, name):
        return next(e for e in self.elements if e.get("id") == name)

    def figure(self, name):
        return float(next(e for e in self.elements if e.get("data-figure") == name)["data-value"])


def answered(loaded=None, prompt="abc", **settings):
    session = Session(ready(loaded or writing_pair()), Limits(max_new_tokens=500))
    return list(session.run(Request(prompt, max_new_tokens=500, **settings)))[-1]


@pytest.fixture(scope="module")
def fixed():
    return answered(rule=FIXED, block_size=5, compare=True)


def test_the_answers_text_is_the_returned_one(fixed):
    """The parser hands text on as a browser's `textContent` does."""
    parsed = Parsed(page.flight(fixed))
    assert "".join(block["text"] for block in parsed.of_class("block")) == fixed.text == TEXT
    assert parsed.by_id("answer")["text"] == TEXT  # nothing but the blocks has text


def test_every_token_shows_its_kind_step_and_width(fixed):
    parsed = Parsed(page.flight(fixed))
    blocks = parsed.of_class("block")
    assert [int(block["data-step"]) for block in blocks] == sorted({token.step for token in fixed.tokens})
    spans = [e for e in parsed.elements if e["tag"] == "span" and e.get("data-tip")]
    assert [(e["text"], "accepted" in e["class"].split()) for e in spans] == [
        (t.text, t.is_accepted) for t in fixed.tokens
    ]
    for element, token in zip(spans, fixed.tokens, strict=True):
        kind = "accepted draft" if token.is_accepted else "the target's own token"
        where = "prefill"
        if token.step:
            where = f"step {token.step}: block of 5, {fixed.trace.steps[token.step - 1].verify_width} verified"
        assert element["data-tip"].startswith(f"{kind}, {where}")


def test_rejected_drafts_are_in_the_tip_and_in_the_strip(fixed):
    columns = re.findall(r'<li data-tip="(.*?)"><svg.*?>(.*?)</svg>', page.strip(fixed), flags=re.S)
    assert len(columns) == len(fixed.trace.steps)
    for (tip, shapes), step in zip(columns, fixed.trace.steps, strict=True):
        accepted = sum(are_accepted(step))
        assert shapes.count("#cell-accepted") == accepted
        assert shapes.count("#cell-own") == len(step.committed_ids) - accepted
        assert shapes.count("#cell-rejected") == max(step.verify_width - 1 - accepted, 0)
        assert shapes.count("#cell-") == len(step.draft_ids) + shapes.count("#cell-own")
        assert ("not kept" in tip) == (accepted < len(step.draft_ids))


def test_copied_tokens_are_a_kind_of_their_own(fixed):
    copied = copy.copy(fixed)
    step = next(i for i, one in enumerate(fixed.trace.steps) if one.num_accepted)
    steps = [replace(one, source="lookup" if i == step else one.source) for i, one in enumerate(fixed.trace.steps)]
    copied.trace = replace(fixed.trace, steps=steps)
    spans = [e for e in Parsed(page.flight(copied)).elements if e["tag"] == "span" and e.get("data-tip")]
    tips = [e["data-tip"] for e in spans if "copied" in e["class"].split()]
    number = sum(token.is_accepted for token in fixed.tokens if token.step == step + 1)
    assert len(tips) == number > 0
    assert all(tip.startswith(f"accepted copy, step {step + 1}: {len(steps[step].draft_ids)} copied") for tip in tips)
    assert page.strip(copied).count('"#cell-copied"') == steps[step].num_accepted
    assert (
        f"{len(steps[step].draft_ids)} copied" in page.strip(copied)
        and "copied" not in page.strip(fixed).split("<svg")[0]
    )
    assert "<td>text so far" in page.result(copied) and "<td>text so far" not in page.result(fixed)


def test_the_decision_marks_the_chosen_size_among_all():
    for rule in (IN_FLIGHT, PAPER):
        answer = answered(tiny_pair(), rule=rule)
        parsed = Parsed(page.decision(answer))
        scores = answer.trace.scores
        assert parsed.of_class("size")[0]["text"] == str(answer.trace.block_size)
        bars = parsed.of_class("bars")[0]
        assert [float(e["data-value"]) for e in parsed.of_class("value")] == list(scores.values())
        assert bars["text"].count("chosen") == 1 == len(parsed.of_class("chosen-bar"))
        assert f"block size {answer.trace.block_size}, chosen" in parsed.of_class("chosen-bar")[0]["text"]
        assert parsed.figure("entropy") == answer.prefill["entropy"]
        heights = [float(h) for h in re.findall(r"height:([\d.]+)%", page.decision(answer))]
        assert max(heights) == 100 and heights[list(scores.values()).index(max(scores.values()))] == 100


def test_without_scores_the_page_says_so(fixed):
    assert "the policy was not asked" in page.decision(fixed) and "bars" not in page.decision(fixed)
    assert "Fixed by the caller" in page.decision(fixed)


def test_figures_are_the_traces(fixed):
    parsed = Parsed(page.result(fixed))
    trace = fixed.trace
    assert parsed.figure("tau") == trace.acceptance_length and parsed.figure("steps") == len(trace.steps)
    assert parsed.figure("speed") == trace.num_new_tokens / fixed.total_s
    assert parsed.figure("ratio") == fixed.plain["ratio"]
    assert json.loads(parsed.by_id("trace")["text"]) == json.loads(json.dumps(fixed.record()))
    assert "identical" in parsed.by_id("verdict")["text"]


def test_nothing_is_compared_that_was_not_asked_for_or_not_finished(fixed):
    alone = answered(rule=FIXED)
    assert page.comparison(alone) == ""
    assert 'data-figure="ratio"' not in page.result(alone)
    stopped = Answer(
        fixed.request, trace=fixed.trace, discarded=fixed.discarded, total_s=1.0, plain={"state": "stopped"}
    )
    assert "was stopped" in page.comparison(stopped) and 'data-figure="ratio"' not in page.result(stopped)
    differs = {**fixed.plain, "is_identical": False, "first_difference": 4, "tokens_there": ["<a>", ""]}
    assert differs["gap"] is None and differs["is_near_tie"] is None
    shown = page.comparison(Answer(fixed.request, trace=fixed.trace, total_s=1.0, plain=differs))
    assert "<code>&lt;a&gt;</code> here" in shown and "<code>the end</code> in plain" in shown
    assert "first at token 5" in Parsed(shown).by_id("verdict")["text"]


@pytest.mark.parametrize(("gap", "is_near_tie"), [(0.0625, True), (1.75, False)])
def test_a_difference_is_shown_with_the_gap_and_what_explains_it(fixed, gap, is_near_tie):
    differs = {**fixed.plain, "is_identical": False, "first_difference": 4, "tokens_there": ["a", "b"]}
    shown = page.comparison(
        Answer(fixed.request, trace=fixed.trace, total_s=1.0, plain={**differs, "gap": gap, "is_near_tie": is_near_tie})
    )
    assert Parsed(shown).figure("gap") == gap and f"{gap:.4f}" in shown
    assert ("a near-tie" in shown) == is_near_tie and ("more than rounding explains" in shown) != is_near_tie


def test_what_comes_from_outside_is_text():
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    answer = answered(writing_pair(evil, accuracy=0.5), prompt=evil, rule=FIXED, block_size=4)
    assert answer.text == evil
    for part in (page.flight(answer), page.result(answer), page.decision(answer), page.error(evil)):
        parsed = Parsed(part)
        assert not [e for e in parsed.elements if e["tag"] in ("script", "img") or "onerror" in e]
    assert "".join(b["text"] for b in Parsed(page.flight(answer)).of_class("block")) == evil


@pytest.mark.parametrize(("finish", "mark"), [("end", "end"), ("length", "token limit"), ("stopped", "stopped")])
def test_how_an_answer_ended_is_marked_and_not_part_of_its_text(fixed, finish, mark):
    answer = Answer(fixed.request, state="done", trace=fixed.trace, tokens=fixed.tokens, discarded=fixed.discarded)
    assert "finish" not in page.flight(answer)
    answer.finish = finish
    parsed = Parsed(page.flight(answer))
    assert parsed.of_class("finish")[0]["data-mark"] == mark and parsed.of_class("finish")[0]["text"] == ""


def test_states_have_words_and_failures_are_alerts():
    for state in ("loading", "prefill", "decoding", "comparing", "done", "stopped"):
        assert Parsed(page.status(Answer(Request("a"), state=state), {"models": {}})).of_class(state)[0]["text"]
    failed = page.status(Answer(Request("a"), state="failed", message="no <b> memory"), {"models": {}})
    assert 'role="alert"' in failed and "No &lt;b&gt; memory" in failed
    for empty in (page.decision(None), page.flight(None)):
        assert 'class="panel' in empty
    assert page.result(None) == ""


# Colours


def colours(selector):
    block = re.search(rf"^{re.escape(selector)} \{{(.*?)^\}}", STYLE, flags=re.S | re.M).group(1)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    """WCAG 2.2, relative luminance of the lighter over the darker."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


TEXT_PAIRS = [
    *((ink, paper) for ink in ("ink", "muted") for paper in ("paper", "panel")),
    *(("ink", paper) for paper in ("accepted-paper", "copied-paper", "field")),
    *((ink, "panel") for ink in ("own", "rejected", "accepted", "copied", "same", "differs")),
    ("muted", "field"),
    ("rejected", "paper"),
    ("action-ink", "action"),
    ("panel", "accepted"),  # the chosen size's label
    ("panel", "ink"),  # tips
]
MARK_PAIRS = [
    ("accepted", "accepted-paper"),
    ("copied", "copied-paper"),
    ("copied", "panel"),
    ("unverified", "panel"),
    ("unverified", "accepted-paper"),
    ("own", "panel"),
]


def test_contrast_is_computed_as_wcag_says():
    assert contrast("#000000", "#ffffff") == 21 and contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("selector", [":root", ".dark"])
def test_text_and_marks_stand_out(selector):
    palette = colours(selector)
    assert palette.keys() == colours(":root").keys() and len(palette) > 10
    for ink, paper in TEXT_PAIRS:
        assert contrast(palette[ink], palette[paper]) >= 4.5, (ink, paper)
    for mark, paper in MARK_PAIRS:
        assert contrast(palette[mark], palette[paper]) >= 3, (mark, paper)


def test_kinds_differ_by_form_and_not_by_colour_alone():
    assert re.search(r"^\.accepted \{.*background.*border-bottom: 2px solid", STYLE, flags=re.M)
    assert re.search(r"^\.copied \{.*background.*border-bottom: 2px dashed", STYLE, flags=re.M)
    assert re.search(r"^\.own \{.*border-bottom: 2px dotted", STYLE, flags=re.M)
    shapes = dict(re.findall(r'<(\w+) id="cell-(\w+)"', page._SHAPES))
    assert set(re.findall(r'id="cell-(\w+)"', page._SHAPES)) == {
        "accepted", "copied", "own", "rejected", "unverified"
    }  # fmt: skip
    assert len(shapes) == 3  # two squares, a ring, and two paths: a cross and a dash
    assert re.search(r"^\.s-copied \{ fill: none", STYLE, flags=re.M)  # one of the squares is full, the other is not


def test_the_style_names_no_other_host():
    assert not re.search(r"url\(|@import|https?:", STYLE)
