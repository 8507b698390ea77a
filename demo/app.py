"""The Space of blockpilot_hf: type a prompt, see which block size is chosen and why, watch the answer arrive.

The interface only; `session.py` makes the answers, `page.py` draws them. Settings are environment variables, see the
README beside this file.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

import page
from answer import Answer
from models import Models, load_from_environment
from request import BY_SECONDS, FIXED, IN_FLIGHT, MAX_BLOCK_SIZE, MAX_TEMPERATURE, PAPER, Limits, Request
from session import Session

try:
    from spaces import GPU  # lends a GPU to a call on ZeroGPU, and is nothing elsewhere
except ImportError:

    def GPU(function: Any) -> Any:
        return function


EXAMPLES = {
    "Maths": "A box holds 12 eggs. How many eggs are in 7 boxes?",
    "Code": "Write a Python function that takes a list of numbers and returns the sum of the even ones.",
    "Translation": "Translate this sentence into French: My sister lives in a small house near the sea.",
    "Summary": "Summarise in one sentence: Bees fly from flower to flower to collect nectar. On the way they carry "
    "pollen, and so plants can make seeds. Without bees many fruits would not grow.",
    "Question": "Why is the sky blue?",
    "JSON": 'Write three fruits with their colours as a JSON list of objects with the keys "name" and "colour".',
}
RULE_CHOICES = [
    ("In flight: every step decides", IN_FLIGHT),
    ("By seconds: once per prompt, for the most tokens per second", BY_SECONDS),
    ("Paper: once per prompt, for the longest acceptance", PAPER),
    ("Fixed size", FIXED),
]
# Answers wait for each other. What only looks has a queue of its own.
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "answers"}
_PAUSE = {"__type__": "update", "active": False}  # of the timer
PRIVATE: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "sans-serif"]
FONT_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]


def build(session: Session) -> gr.Blocks:
    """The page and the endpoints. Nothing is loaded, fetched or run here."""

    watching: set[str] = set()  # visitors whose answer is being shown

    @GPU
    def answers(request: Request, visitor: str) -> Iterator[Answer]:
        yield from session.run(request, visitor)

    def show(
        prompt: str, max_new_tokens: int, temperature: float, seed: int, rule: str, block_size: int, compare: bool,
        visitor: gr.Request,
    ) -> Iterator[Any]:  # fmt: skip
        request = Request(prompt, max_new_tokens, temperature, seed, rule, block_size, compare)
        watching.add(_name(visitor))
        try:
            drawn: list[Any] = [None] * 4
            for answer in answers(request, _name(visitor)):
                fresh = draw(session, answer)
                changes = [gr.skip() if old == new else new for old, new in zip(drawn, fresh, strict=True)]
                if drawn == fresh and not answer.is_over:
                    continue  # during a long pass; Stop and a closed tab end the answer without a view
                drawn = fresh
                # While it runs the buttons are the browser's: it knows of a pressed Stop first.
                yield (*changes, *(buttons(is_running=False) if answer.is_over else (gr.skip(), gr.skip())))
        except ValueError as problem:  # of the request; whatever else happens is part of an answer
            yield (page.error(str(problem)), gr.skip(), gr.skip(), gr.skip(), *buttons(is_running=False))
        finally:
            watching.discard(_name(visitor))

    def stop(visitor: gr.Request) -> Any:
        answer = session.stop(_name(visitor))
        if answer is None:
            return (page.note("Stopped before it began."), gr.skip(), gr.skip(), gr.skip(), *buttons(is_running=False))
        drawn = draw(session, answer)
        if not answer.is_over:  # a pass that takes longer than we waited; a new run waits for its end
            drawn[0] = page.STOPPING
        return (*drawn, *buttons(is_running=False))

    def look(visitor: gr.Request) -> Any:
        """How far loading is, until it is over or a run tells."""
        if _name(visitor) in watching:  # a look that was on its way when Run was pressed
            return gr.skip(), gr.Timer(active=False)
        state = session.info()
        return page.status(None, state), gr.Timer(active=state["state"] in ("not loaded", "loading"))

    def leave(visitor: gr.Request) -> None:
        session.stop(_name(visitor), wait_s=0)

    def generate(
        visitor: gr.Request,
        prompt: str,
        max_new_tokens: int = 96,
        temperature: float = 0.0,
        seed: int = 0,
        rule: str = IN_FLIGHT,
        block_size: int = 8,
        compare: bool = False,
    ) -> Iterator[tuple[str, dict]]:
        """
        Answer a prompt; intermediate results are the text so far and an incomplete trace.

        Returns the text, and the trace as JSON: block size, scores, every step, seconds; with the prefill's top
        tokens, the comparison, the request and the models.
        """
        try:
            for answer in answers(
                Request(prompt, max_new_tokens, temperature, seed, rule, block_size, compare), _name(visitor)
            ):
                if answer.state == "failed":
                    raise gr.Error(answer.message)
                yield answer.text, answer.record() if answer.is_over else {"state": answer.state}
        except ValueError as problem:
            raise gr.Error(str(problem)) from problem

    def info() -> dict:
        """State, models, rules and limits; answers while others wait."""
        return session.info()

    with gr.Blocks(title="BlockPilot", analytics_enabled=False, fill_width=True) as demo:
        gr.HTML(
            "<h1>BlockPilot</h1><p>A drafter proposes a block of tokens in one pass, the target verifies it in one "
            "pass, and a small policy chooses how large the block is. The text stays the target&rsquo;s own.</p>",
            elem_id="masthead",
        )
        with gr.Row():
            with gr.Column(scale=4, min_width=320, elem_id="form"):
                prompt = gr.Textbox(
                    label="Prompt", value=EXAMPLES["Maths"], lines=4, max_lines=12, elem_id="prompt",
                    placeholder="A question or a task",
                )  # fmt: skip
                with gr.Row(elem_id="examples"):
                    examples = [gr.Button(name, size="sm", min_width=0) for name in EXAMPLES]
                compare = gr.Checkbox(label="Compare with plain decoding afterwards", elem_id="compare")
                with gr.Row(elem_id="actions"):
                    run_button = gr.Button("Run", variant="primary", elem_id="run")
                    stop_button = gr.Button("Stop", variant="secondary", elem_id="stop", interactive=False)
                status = gr.HTML(
                    page.status(None, session.info()), elem_id="status",
                    html_template='<div role="status" aria-live="polite">${value}</div>',
                )  # fmt: skip
                with gr.Accordion("Settings", open=False, elem_id="settings"):
                    rule = gr.Radio(RULE_CHOICES, value=IN_FLIGHT, label="How the block size is chosen", elem_id="rule")
                    block_size = gr.Slider(
                        1, MAX_BLOCK_SIZE, value=8, step=1, label="Block size (1 is plain decoding)", visible=False,
                        elem_id="block-size",
                    )  # fmt: skip
                    most = session.limits.max_new_tokens
                    tokens = gr.Slider(1, most, value=min(96, most), step=1, label="New tokens", elem_id="tokens")
                    temperature = gr.Slider(
                        0,
                        min(2, MAX_TEMPERATURE),
                        value=0,
                        step=0.05,
                        label="Temperature (0 is greedy)",
                        elem_id="temperature",
                    )
                    seed = gr.Number(value=0, precision=0, minimum=0, label="Seed", elem_id="seed")
            with gr.Column(scale=7, min_width=320, elem_id="view"):
                decision = gr.HTML(page.decision(None), elem_id="decision")
                flight = gr.HTML(page.flight(None), elem_id="flight")
                result = gr.HTML(page.result(None), elem_id="result")

        loading = gr.Timer(2.0)
        outputs = [status, decision, flight, result, run_button, stop_button]
        fields = [prompt, tokens, temperature, seed, rule, block_size, compare]
        for button, text in zip(examples, EXAMPLES.values(), strict=True):
            button.click(None, None, prompt, js=f"() => {json.dumps(text)}", api_visibility="private")  # at once
        rule.change(lambda rule: gr.update(visible=rule == FIXED), rule, block_size, **PRIVATE)
        # The browser reacts before the server has heard of it. Stop can be pressed before the turn comes, too.
        ask = [run_button.click, prompt.submit]
        gr.on(
            ask, None, None, [run_button, stop_button, loading], js=_in_browser(*buttons(is_running=True), _PAUSE),
            api_visibility="private",
        )  # fmt: skip
        # "multiple": a run that was just stopped still counts as running for a moment, and "once" would then ignore the
        # next click after its buttons had changed, for good. A second click is kept off by the button itself.
        running = gr.on(
            ask, show, fields, outputs, api_visibility="private", show_progress="minimal", show_progress_on=status,
            trigger_mode="multiple", **ONE_AT_A_TIME,
        )  # fmt: skip
        stop_button.click(
            None, None, [status, stop_button], js=_in_browser(page.STOPPING, buttons(is_running=False)[1]),
            api_visibility="private",
        )  # fmt: skip
        stop_button.click(stop, None, outputs, cancels=[running], **PRIVATE)
        gr.on([demo.load, loading.tick], look, None, [status, loading], **PRIVATE)
        demo.unload(leave)
        # Gradio reads from it what the outputs are, and takes an iterator for one that can be anything.
        generate.__annotations__["return"] = tuple[str, dict]
        gr.api(generate, api_name="generate", **ONE_AT_A_TIME)
        gr.api(info, api_name="info", concurrency_limit=8, concurrency_id="info")
    demo.queue(max_size=64)
    return demo


def draw(session: Session, answer: Answer) -> list[Any]:
    """The four parts of the page."""
    return [page.status(answer, session.info()), page.decision(answer), page.flight(answer), page.result(answer)]


def buttons(*, is_running: bool) -> tuple[Any, Any]:
    """Run and Stop, one of them at a time."""
    return gr.update(interactive=not is_running), gr.update(interactive=is_running)


def _in_browser(*values: Any) -> str:
    """A handler without the server: these values for the outputs."""
    return f"() => {json.dumps(values)}"


def _name(visitor: gr.Request) -> str:
    return visitor.session_hash or ""


def launch_options() -> dict[str, Any]:
    """How the page is served: system fonts, our colours, nothing from other hosts."""
    colours = {
        "body_background_fill": "paper", "body_text_color": "ink", "body_text_color_subdued": "muted",
        "background_fill_primary": "panel", "background_fill_secondary": "paper", "border_color_primary": "line",
        "border_color_accent": "action", "color_accent_soft": "accepted-paper", "link_text_color": "action",
        "block_background_fill": "panel", "block_border_color": "line", "block_label_text_color": "muted",
        "block_label_background_fill": "panel", "block_title_text_color": "ink", "block_info_text_color": "muted",
        "panel_background_fill": "panel", "input_background_fill": "field", "input_border_color": "line",
        "input_border_color_focus": "action", "input_placeholder_color": "muted", "accordion_text_color": "ink",
        "button_primary_background_fill": "action", "button_primary_background_fill_hover": "action",
        "button_primary_text_color": "action-ink", "button_primary_border_color": "action",
        "button_secondary_background_fill": "panel", "button_secondary_background_fill_hover": "accepted-paper",
        "button_secondary_text_color": "ink", "button_secondary_border_color": "line",
        "checkbox_background_color": "field", "checkbox_background_color_selected": "action",
        "checkbox_border_color": "muted", "checkbox_border_color_selected": "action",
        "checkbox_label_text_color": "ink",
        "checkbox_label_text_color_selected": "ink", "checkbox_label_background_fill": "panel",
        "checkbox_label_background_fill_selected": "accepted-paper", "checkbox_label_border_color": "line",
        "slider_color": "action", "error_background_fill": "panel", "error_text_color": "rejected",
        "loader_color": "action",
    }  # fmt: skip
    base = gr.themes.Base(
        font=FONT, font_mono=FONT_MONO, radius_size=gr.themes.sizes.radius_md, spacing_size=gr.themes.sizes.spacing_md
    )
    known = vars(base)
    values = {}
    for name, colour in colours.items():
        values[name] = f"var(--{colour})"
        if f"{name}_dark" in known:
            values[f"{name}_dark"] = f"var(--{colour})"
    port = os.environ.get("PORT")
    return {
        "theme": base.set(**values),
        "css_paths": [Path(__file__).with_name("style.css")],
        "ssr_mode": False,  # no second server, no Node
        "footer_links": ["api"],
        "server_port": int(port) if port and "GRADIO_SERVER_PORT" not in os.environ else None,
        "show_error": True,
    }


def session_from_environment() -> Session:
    """With nothing loaded yet."""
    return Session(Models(lambda: load_from_environment(os.environ)), Limits.from_environment(os.environ))


def main() -> None:
    session = session_from_environment()
    demo = build(session)
    session.models.load_in_background()
    demo.launch(**launch_options())


if __name__ == "__main__":
    main()
