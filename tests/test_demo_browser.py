"""The Space's page in a Chromium: what a visitor sees, presses and copies. Run with `pytest -m browser`."""

import json
import re
import threading

import pytest
from demo_pair import TEXT, tiny_pair, writing_pair

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
gr = pytest.importorskip("gradio")
pytest.importorskip("playwright")

import screenshots  # noqa: E402
from models import Models  # noqa: E402

pytest_plugins = ["demo_server"]


@pytest.fixture(scope="module")
def chromium():
    try:
        with screenshots.browser() as chromium:
            yield chromium
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def writer(serve):
    return serve(writing_pair())


@pytest.fixture(scope="module")
def slow(serve):
    return serve(writing_pair(ends=False, seconds_per_pass=0.1))


@pytest.fixture
def visit(chromium):
    """`visit(url)` to a page that may ask nothing of other hosts and log no error."""
    contexts, problems = [], []

    def visit(url, **options):
        context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # the first page of a busy machine takes its time
        page.on(
            "request", lambda request: request.url.startswith((url, "data:", "blob:")) or problems.append(request.url)
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#run:not([disabled])")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []


def set_value(page, selector, value):
    page.fill(selector, str(value))
    page.press(selector, "Tab")


def choose(page, *, rule=None, block_size=None, tokens=None):
    if not page.is_visible("#rule"):
        page.click("#settings > button, #settings .label-wrap")
        page.wait_for_selector("#rule", state="visible")
    if rule:
        page.click(f"#rule label:has-text('{rule}')")
    if block_size:
        page.wait_for_selector("#block-size input[type=number]")
        set_value(page, "#block-size input[type=number]", block_size)
    if tokens:
        set_value(page, "#tokens input[type=number]", tokens)


def run(page, prompt="abc"):
    page.fill("#prompt textarea", prompt)
    page.click("#run")
    page.wait_for_selector("#run[disabled]")
    page.wait_for_selector("#run:not([disabled])")


def trace_of(page):
    return json.loads(page.text_content("#trace"))


def figure(page, name):
    return float(page.get_attribute(f"[data-figure={name}]", "data-value"))


def test_a_visit_from_prompt_to_comparison(visit, serve):
    page = visit(serve(tiny_pair())[0])
    page.check("#compare input")
    choose(page, tokens=30)
    run(page)
    trace = trace_of(page)
    assert trace["request"]["prompt"] == "abc" and trace["num_new_tokens"] == 30
    assert page.text_content(".chosen .size") == str(trace["block_size"])
    assert page.locator(".bars li").count() == len(trace["scores"])
    assert figure(page, "tau") == trace["acceptance_length"] and figure(page, "steps") == len(trace["steps"])
    assert figure(page, "ratio") == trace["plain"]["ratio"] and "identical" in page.text_content("#verdict")
    assert figure(page, "entropy") == trace["prefill"]["entropy"]
    assert page.locator(".strip li").count() == len(trace["steps"])
    assert "Done." in page.text_content("#status [aria-live=polite]")


def test_rules_and_sizes_are_switched(visit, writer, serve):
    page = visit(serve(tiny_pair())[0])
    for rule, adapt in (("Paper", "prompt"), ("By seconds", "prompt"), ("In flight", "flight")):
        choose(page, rule=rule, tokens=10)
        assert not page.is_visible("#block-size")
        run(page)
        assert trace_of(page)["adapt"] == adapt and page.text_content(".chosen .size") == str(
            trace_of(page)["block_size"]
        )
    choose(page, rule="Fixed size", block_size=5)
    run(page)
    assert trace_of(page)["block_size"] == 5 and page.text_content(".chosen .size") == "5"


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_copied_text_is_the_returned_one(visit, writer, block_size):
    """By selecting and copying with the keyboard, and by the button."""
    page = visit(writer[0])
    choose(page, rule="Fixed size", block_size=block_size, tokens=400)
    run(page)
    assert page.evaluate("[...document.querySelectorAll('#answer .block')].map(b => b.textContent).join('')") == TEXT
    page.click("button.copy")
    page.wait_for_selector("button.copy:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == TEXT
    page.evaluate("navigator.clipboard.writeText('')")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#answer'))")
    page.keyboard.press("Control+C")
    page.wait_for_function("navigator.clipboard.readText().then(text => text.length > 0)")
    assert page.evaluate("navigator.clipboard.readText()") == TEXT


def test_tokens_tell_their_step_when_they_are_pointed_at(visit, writer):
    page = visit(writer[0])
    choose(page, rule="Fixed size", block_size=4, tokens=60)
    run(page)
    shown = "element => getComputedStyle(element, '::after').content"
    for kind in ("accepted", "own"):
        token = page.locator(f"#answer .{kind}").nth(2)
        assert token.evaluate(shown) == "none"
        token.hover()
        assert re.search(r"step \d+: block of 4, \d verified, \d accepted", token.evaluate(shown))
    assert page.evaluate("document.querySelector('#answer').innerText").count("step") == 0
    begins = page.locator("#answer .block").nth(1).evaluate("e => parseFloat(getComputedStyle(e).borderLeftWidth)")
    assert begins >= 1  # blocks are told apart


def test_stop_works_at_once_and_keeps_what_is_there(visit, slow):
    url, session = slow
    page = visit(url)
    choose(page, rule="Fixed size", block_size=2, tokens=400)
    page.click("#run")
    page.wait_for_function("document.querySelectorAll('#answer .block').length > 4")
    assert session.info()["is_busy"] and not page.query_selector("#trace")
    page.click("#stop")
    page.wait_for_selector("#run:not([disabled])", timeout=10_000)
    assert not session.info()["is_busy"]
    assert "Stopped." in page.text_content("#status")
    trace = trace_of(page)
    assert trace["finish"] == "stopped" and 5 < trace["num_new_tokens"] < 100
    assert page.locator(".strip li").count() == len(trace["steps"])
    choose(page, tokens=5)
    run(page)
    assert trace_of(page)["num_new_tokens"] == 5


def test_stop_during_the_prefill_shows_at_once_and_nothing_is_decoded(visit, serve):
    loaded = writing_pair(ends=False)
    url, session = serve(loaded)
    began, may_end, passes = threading.Event(), threading.Event(), []

    def hold(*args):
        passes.append(None)
        began.set()
        assert may_end.wait(60)

    hook = loaded.target.register_forward_pre_hook(hold)
    page = visit(url)
    choose(page, rule="Fixed size", block_size=4, tokens=400)
    page.click("#run")
    assert began.wait(60)
    page.wait_for_selector("#status :text('Reading the prompt')")
    page.click("#stop")
    page.wait_for_selector("#status :text('Stopping')", timeout=1000)
    page.wait_for_selector("#stop[disabled]", timeout=1000)
    assert session.info()["is_busy"]  # a pass that has begun cannot be broken off
    may_end.set()
    page.wait_for_selector("#run:not([disabled])")
    assert "Stopped." in page.text_content("#status") and not session.info()["is_busy"]
    assert len(passes) == 1 and trace_of(page)["steps"] == [] and trace_of(page)["finish"] == "stopped"
    hook.remove()
    choose(page, tokens=5)
    run(page)
    assert trace_of(page)["num_new_tokens"] == 5


def test_a_page_says_that_the_models_are_being_loaded_and_a_run_waits_for_them(visit, serve):
    may_end, pair = threading.Event(), writing_pair(ends=False, seconds_per_pass=0.2)
    models = Models(lambda: (may_end.wait(120), pair)[1])
    url, session = serve(models)
    models.load_in_background()
    watching, asking, leaving = visit(url), visit(url), visit(url)
    for page in (watching, asking, leaving):
        page.wait_for_selector("#status :text('The models are being loaded')")
    leaving.click("#run")
    leaving.wait_for_selector("#status :text('Loading the models')")
    leaving.click("#stop")
    leaving.wait_for_selector("#run:not([disabled])")
    assert "Stopped before it began" in leaving.text_content("#status")
    # A look at how far loading is that was on its way when Run was pressed.
    late = []
    asking.route("**/run/predict*", lambda route: route.continue_() if late else late.append(route))
    while not late:
        asking.wait_for_timeout(100)
    asking.click("#run")
    asking.wait_for_selector("#status :text('Loading the models')")
    late[0].continue_()
    asking.wait_for_timeout(500)
    may_end.set()
    asking.wait_for_selector("#status :text('Answering')")
    asking.wait_for_timeout(3000)  # the page looks every two seconds, until a run tells
    assert "Answering" in asking.text_content("#status")
    asking.click("#stop")
    asking.wait_for_selector("#trace", state="attached")
    assert trace_of(asking)["state"] == "stopped"
    watching.wait_for_selector("#status :text('Ready.')")
    assert "tiny" in watching.text_content("#status .where")
    assert not leaving.query_selector("#trace") and not session.info()["is_busy"]


def test_models_that_fail_to_load_are_told_of_and_tried_again(visit, serve):
    outcomes = [OSError("no room on the disk"), OSError("no room on the disk"), writing_pair()]

    def load():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    models = Models(load)
    url, _ = serve(models)
    models.load_in_background().join()
    page = visit(url)
    page.wait_for_selector("#status :text('could not be loaded; a run tries again')")
    page.click("#run")
    page.wait_for_selector("#status [role=alert]")
    assert "no room on the disk" in page.text_content("#status [role=alert]")
    page.wait_for_selector("#run:not([disabled])")
    run(page)
    assert trace_of(page)["state"] == "done"


def test_a_closed_tab_frees_the_model(visit, slow):
    url, session = slow
    page = visit(url)
    choose(page, tokens=400)
    page.click("#run")
    page.wait_for_function("document.querySelectorAll('#answer .block').length > 2")
    assert session.info()["is_busy"]
    page.close()
    other = visit(url)
    choose(other, tokens=3)
    run(other)
    assert trace_of(other)["num_new_tokens"] == 3


def test_a_second_visitor_sees_the_place_in_the_queue_and_may_leave(visit, slow):
    url, session = slow
    first, second = visit(url), visit(url)
    choose(first, tokens=400)
    first.click("#run")
    first.wait_for_function("document.querySelectorAll('#answer .block').length > 2")
    second.click("#run")
    second.wait_for_selector("#status :text('queue')")
    # What a box around it cuts off has a size of its own, too: how much of it is to be seen?
    share = "e => new Promise(tell => new IntersectionObserver(([entry]) => tell(entry.intersectionRatio)).observe(e))"
    assert second.locator("#status .progress-text").evaluate(share) > 0.9
    second.click("#stop")
    second.wait_for_selector("#run:not([disabled])")
    assert "Stopped before it began" in second.text_content("#status")
    assert session.info()["is_busy"]  # the first one goes on
    first.click("#stop")
    first.wait_for_selector("#run:not([disabled])")
    choose(second, tokens=3)
    run(second)
    assert trace_of(second)["num_new_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "prompt is empty"), ("a" * 300, "has 302 tokens, and 200 are allowed")]
)
def test_errors_are_messages_on_the_page(visit, writer, prompt, message):
    page = visit(writer[0])
    page.fill("#prompt textarea", prompt)
    page.click("#run")
    page.wait_for_selector("#status [role=alert]")
    assert message in page.text_content("#status [role=alert]")
    page.wait_for_selector("#run:not([disabled])")
    run(page)
    assert "Done." in page.text_content("#status")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_the_page_fits_and_can_be_used_by_keyboard(visit, writer, size, scheme):
    width, height = screenshots.SIZES[size]
    page = visit(writer[0], viewport={"width": width, "height": height}, color_scheme=scheme)
    choose(page, rule="Fixed size")
    run(page)
    for summary in page.locator("#result summary").all():
        summary.click()
    page.wait_for_selector("#trace", state="visible")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("#settings > button, #settings .label-wrap")
    assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    unnamed = """[...document.querySelectorAll('input, textarea, button')].filter(e => e.offsetParent !== null &&
        !(e.labels && e.labels.length) && !e.ariaLabel && !e.title && !e.innerText.trim()).map(e => e.outerHTML)"""
    assert page.evaluate(unnamed) == []
    page.focus("#prompt textarea")
    order = []
    for _ in range(16):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.innerText || document.activeElement.id"))
    order = [text.strip().split("\n")[0] for text in order]
    places = [order.index(name) for name in ("Maths", "Run", "Settings", "Copy", "Trace as JSON")]
    assert places == sorted(places)
