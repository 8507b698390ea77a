"""An answer as HTML: decision, flight, result. Pure functions of an [`Answer`]; every figure is one of its trace.

All text from outside is escaped. Marks between and around tokens are made by `style.css`, so that they are not part of
what a visitor copies.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from answer import Answer, Token
from blockpilot_hf.display import acceptance_line, are_accepted, counted, speed_line
from blockpilot_hf.trace import DecodeTrace, StepRecord

_CELL_WIDTH, _CELL_HEIGHT = 12, 10
# The text as it stands, whatever the browser makes of a selection.
COPY = (
    "navigator.clipboard.writeText([...document.querySelectorAll('#answer .block')].map(b => b.textContent).join(''));"
    "this.textContent = 'Copied'"
)
_STATES = {
    "loading": "Loading the models. The first time this takes a minute or two.",
    "prefill": "Reading the prompt.",
    "decoding": "Answering.",
    "comparing": "Done. Now plain decoding of the same prompt, for comparison.",
    "done": "Done.",
    "stopped": "Stopped. What was decoded stays.",
}
STOPPING = '<p class="status stopping">Stopping: the pass at hand ends first, and nothing is decoded after it.</p>'
_FINISHES = {
    "end": ("end", "end of the answer"),
    "length": ("token limit", "cut off: all tokens asked for"),
    "stopped": ("stopped", "stopped by you"),
}


def status(answer: Answer | None, info: dict[str, Any]) -> str:
    """One sentence. It changes with the state only, because screen readers read each change."""
    if answer is None:
        states = {"ready": "Ready.", "failed": "The models could not be loaded; a run tries again."}
        text = states.get(info["state"], "The models are being loaded; a run waits for them.")
    elif answer.state == "failed":
        return error(answer.message)
    else:
        text = _STATES[answer.state]
    facts = (answer.facts if answer else {}) or info["models"]
    where = f'<span class="where">{escape(_where(facts))}</span>' if facts else ""
    return f'<p class="status {"" if answer is None else answer.state}">{escape(text)}</p>{where}'


def note(message: str) -> str:
    """What happened that is no answer and no error."""
    return f'<p class="status">{escape(message)}</p>'


def error(message: str) -> str:
    """What went wrong, for the place of the status."""
    return f'<p class="status failed" role="alert"><strong>Not done:</strong> {escape(_capital(message))}</p>'


def decision(answer: Answer | None) -> str:
    """The chosen block size, what the policy predicted for each, and what the prefill said."""
    trace = None if answer is None else answer.trace
    if trace is None:
        size, caption = "", "chosen after the prefill, before anything is drafted"
        chart = '<p class="empty">The policy\'s prediction for every candidate size appears here.</p>'
    else:
        size = str(trace.block_size)
        caption = "block size to start from: every step decides anew" if trace.adapt == "flight" else "block size"
        chart = bars(trace)
    reason = "" if trace is None else f'<p class="reason">{escape(_capital(trace.reason))}.</p>'
    prefill = "" if answer is None or answer.prefill is None else _prefill(answer.prefill, answer.num_prompt_tokens)
    return (
        '<section class="panel decision" aria-labelledby="h-decision"><h2 id="h-decision">Decision</h2>'
        f'<div class="chosen"><p class="size" data-value="{size}">{size or "&ndash;"}</p><p>{caption}</p></div>'
        f'<div class="chart">{chart}{reason}</div>{prefill}</section>'
    )


def bars(trace: DecodeTrace) -> str:
    """A bar for each candidate size; without scores the words that say why there are none."""
    if not trace.scores:
        return '<p class="empty">No prediction for this rule: the policy was not asked.</p>'
    is_speed = trace.scores.get(1) == 1.0  # plain decoding is as fast as plain decoding: head `curve`
    title = "Predicted speed by block size, plain decoding = 1" if is_speed else "The policy's score by block size"
    values = list(trace.scores.values())
    base, top = min(0.0, *values), max(values)
    span = (top - base) or 1.0
    items = []
    for size, value in trace.scores.items():
        is_chosen = size == trace.block_size
        height = max(2.0, 100 * (value - base) / span)
        items.append(
            f"<li{' class=chosen-bar' if is_chosen else ''}>"
            f'<span class="value" data-value="{value!r}">{value:.2f}</span>'
            f'<span class="column" aria-hidden="true"><span style="height:{height:.1f}%"></span></span>'
            f'<span class="label"><span class="sr">block size </span>{size}'
            f"{'<span class=sr>, chosen</span>' if is_chosen else ''}</span></li>"
        )
    return f'<p class="title">{title}</p><ol class="bars" aria-label="{escape(title)}">{"".join(items)}</ol>'


def flight(answer: Answer | None) -> str:
    """The answer with every token's kind, and its steps."""
    if answer is None:
        body = '<div class="answer empty" id="answer">The answer arrives here, block by block.</div>'
        return _flight(body, "", "")
    steps = answer.trace.steps if answer.trace is not None else []
    count = ""
    if answer.trace is not None:
        count = f"{counted(answer.trace.num_new_tokens, 'token')}, {counted(len(steps), 'step')}"
        if answer.state == "comparing" and answer.num_plain_tokens:
            count += f"; plain decoding: {counted(answer.num_plain_tokens, 'token')}"
    text = "".join(_block(number, tokens, answer) for number, tokens in _by_step(answer.tokens))
    mark = ""
    if answer.finish:
        shown, words = _FINISHES[answer.finish]
        mark = f'<span class="finish" role="img" aria-label="{words}" data-mark="{shown}"></span>'
    elif not answer.is_over:
        mark = '<span class="caret" aria-hidden="true"></span>'
    body = f'<div class="answer" id="answer" role="group" aria-label="Answer" tabindex="0">{text}{mark}</div>'
    return _flight(body, strip(answer) if steps else "", count, has_text=bool(text))


def _flight(body: str, chart: str, count: str, *, has_text: bool = False) -> str:
    copy = f'<button type="button" class="copy" onclick="{_attribute(COPY)}">Copy</button>' if has_text else ""
    return (
        '<section class="panel flight" aria-labelledby="h-flight"><h2 id="h-flight">Flight</h2>'
        f'<p class="count">{escape(count)}{copy}</p>{body}{chart}{LEGEND}</section>'
    )


def _by_step(tokens: Sequence[Token]) -> list[tuple[int, list[Token]]]:
    blocks: list[tuple[int, list[Token]]] = []
    for token in tokens:
        if not blocks or blocks[-1][0] != token.step:
            blocks.append((token.step, []))
        blocks[-1][1].append(token)
    return blocks


def _block(number: int, tokens: Sequence[Token], answer: Answer) -> str:
    assert answer.trace is not None
    about, taken = "prefill", "accepted"
    if number > 0:
        step = answer.trace.steps[number - 1]
        about, taken = step_words(number, step, answer.discarded[number - 1]), taken_kind(step)
    spans = []
    for token in tokens:
        kind = taken if token.is_accepted else "own"
        words = _KINDS[kind]
        line_end = " line-end" if token.text.startswith("\n") else ""
        spans.append(
            f'<span class="{kind}{line_end}" data-tip="{_attribute(f"{words}, {about}")}">{_text(token.text)}</span>'
        )
    return f'<span class="block" data-step="{number}">{"".join(spans)}</span>'


def taken_kind(step: StepRecord) -> str:
    """Of the step's accepted tokens."""
    return "copied" if step.source == "lookup" else "accepted"


def step_words(number: int, step: StepRecord, discarded: str) -> str:
    """A step in a line of text."""
    if not step.draft_ids:
        return f"step {number}: plain" + (f" ({step.reason})" if step.reason else "")
    block = f"{len(step.draft_ids)} copied" if step.source == "lookup" else f"block of {step.block_size}"
    words = f"step {number}: {block}, {step.verify_width} verified, {sum(are_accepted(step))} accepted"
    return words + (f", not kept: “{_visible(discarded)}”" if discarded else "")


def strip(answer: Answer) -> str:
    """One column for each step, from below: accepted (or copied), the target's own, rejected, not verified."""
    assert answer.trace is not None
    steps = answer.trace.steps
    columns = []
    for number, (step, discarded) in enumerate(zip(steps, answer.discarded, strict=True), start=1):
        kinds = cells(step)
        height = len(kinds) * _CELL_HEIGHT
        shapes = "".join(
            f'<use href="#cell-{kind}" y="{height - (place + 1) * _CELL_HEIGHT}"/>' for place, kind in enumerate(kinds)
        )
        words = _attribute(step_words(number, step, discarded))
        picture = f'<svg width="{_CELL_WIDTH}" height="{height}" aria-hidden="true">{shapes}</svg>'
        columns.append(f'<li data-tip="{words}">{picture}</li>')
    drafted, copied = (
        sum(len(step.draft_ids) for step in steps if (step.source == "lookup") == is_copy) for is_copy in (False, True)
    )
    verified = sum(step.verify_width - 1 for step in steps)
    accepted = sum(sum(are_accepted(step)) for step in steps)
    copies = f"{copied:,} copied, " if copied else ""
    words = f"{counted(drafted, 'token')} drafted, {copies}{verified:,} verified, {accepted:,} accepted"
    return (
        f'<p class="title">Steps, from left to right: {words}</p>{_SHAPES}'
        f'<ol class="strip" role="img" aria-label="{counted(len(steps), "step")}: {words}. The table below has each.">'
        f"{''.join(columns)}</ol>"
    )


def cells(step: StepRecord) -> list[str]:
    """The kinds of a step's positions."""
    accepted = sum(are_accepted(step))
    own = len(step.committed_ids) - accepted
    rejected = max(step.verify_width - 1 - accepted, 0)
    unverified = len(step.draft_ids) - accepted - rejected
    return [taken_kind(step)] * accepted + ["own"] * own + ["rejected"] * rejected + ["unverified"] * unverified


def result(answer: Answer | None) -> str:
    """Figures of the trace once it is whole, the comparison, the steps as a table and the trace itself."""
    if answer is None or answer.total_s is None or answer.trace is None:
        return ""
    trace = answer.trace
    per_second = trace.num_new_tokens / answer.total_s
    figures = [
        ("tau", f"{trace.acceptance_length:.2f}", trace.acceptance_length, "tokens per step (tau)"),
        ("steps", f"{len(trace.steps):,}", len(trace.steps), f"steps for {counted(trace.num_new_tokens, 'token')}"),
        ("speed", f"{per_second:.1f}", per_second, "tokens per second"),
    ]
    if answer.plain is not None and answer.plain["state"] == "done":
        ratio = answer.plain["ratio"]
        figures.append(("ratio", f"{ratio:.2f}&times;", ratio, "as fast as plain decoding"))
    tiles = "".join(
        f'<div class="tile"><dd data-figure="{name}" data-value="{value!r}">{shown}</dd><dt>{words}</dt></div>'
        for name, shown, value, words in figures
    )
    lines = [acceptance_line(trace), speed_line(trace, answer.total_s)]
    if trace.costs:
        lines.append(f"decided by costs {trace.costs}")
    details = "".join(f"<li>{escape(_capital(line))}.</li>" for line in lines)
    rows = "".join(_row(*each) for each in enumerate(zip(trace.steps, answer.discarded, strict=True), start=1))
    record = json.dumps(answer.record(), ensure_ascii=False, indent=1, allow_nan=False)
    return (
        '<section class="panel result" aria-labelledby="h-result"><h2 id="h-result">Result</h2>'
        f'<dl class="tiles">{tiles}</dl>{comparison(answer)}<ul class="lines">{details}</ul>'
        "<details><summary>Every step as a table</summary>"
        "<div class=scroll tabindex=0 role=region aria-label=Steps><table>"
        "<thead><tr><th>step<th>proposed by<th>block<th>verified<th>accepted<th>not kept"
        "<th>why not a full block</thead>"
        f"<tbody>{rows}</tbody></table></div></details>"
        "<details><summary>Trace as JSON</summary>"
        f'<pre class="scroll" id="trace" tabindex="0" aria-label="Trace as JSON">{_text(record)}</pre>'
        "</details></section>"
    )


def comparison(answer: Answer) -> str:
    """Both speeds as bars, and whether the texts are the same; empty where nothing was compared."""
    plain, trace = answer.plain, answer.trace
    if plain is None or trace is None or answer.total_s is None:
        return ""
    if plain["state"] != "done":
        return '<p class="verdict">The comparison was stopped before plain decoding was through.</p>'
    speeds = [("this answer", trace.num_new_tokens / answer.total_s), ("plain decoding", plain["tokens_per_second"])]
    top = max(value for _, value in speeds)
    rows = "".join(
        f'<li><span class="name">{name}</span><span class="rail" aria-hidden="true">'
        f'<span style="width:{100 * value / top:.1f}%"></span></span>'
        f'<span class="value">{value:.1f} tokens per second</span></li>'
        for name, value in speeds
    )
    if plain["is_identical"]:
        verdict = '<p class="verdict same" id="verdict">The two texts are <strong>identical</strong>.</p>'
    else:
        ours, theirs = (f"<code>{escape(_visible(text)) or 'the end'}</code>" for text in plain["tokens_there"])
        verdict = (
            '<p class="verdict differs" id="verdict">The two texts <strong>differ</strong>: first at token '
            f"{plain['first_difference'] + 1:,}, {ours} here and {theirs} in plain decoding. "
            f"{_why_they_differ(plain)}</p>"
        )
    words = "Measured right after this answer, one call each, the same prompt and seed, prefill included."
    return f'<ul class="speeds">{rows}</ul>{verdict}<p class="note">{words}</p>'


def _why_they_differ(plain: dict[str, Any]) -> str:
    """The gap of the two tokens' scores, and whether rounding explains the difference."""
    if plain["gap"] is None:
        return "How near the two tokens are is measured for greedy answers that both go on there."
    gap = f'<span data-figure="gap" data-value="{plain["gap"]!r}">{abs(plain["gap"]):.4f}</span>'
    if plain["is_near_tie"]:
        return (
            f"Their scores are {gap} apart there, no more than rounding changes them when several positions are "
            "computed in one pass: a near-tie."
        )
    return f"Their scores are {gap} apart there, more than rounding explains."


def _row(number: int, each: tuple[StepRecord, str]) -> str:
    step, discarded = each
    proposer = {"lookup": "text so far", "drafter": "drafter"}.get(step.source, "")
    counts = [step.block_size, step.verify_width, sum(are_accepted(step))]
    values = [number, proposer, *counts, _visible(discarded), step.reason]
    return f"<tr>{''.join(f'<td>{escape(str(value))}' for value in values)}</tr>"


def _prefill(prefill: dict[str, Any], num_prompt_tokens: int) -> str:
    tokens = ", ".join(
        f"<span class=nowrap><code>{escape(_visible(token['text']))}</code> {100 * token['probability']:.0f} %</span>"
        for token in prefill["top_tokens"]
    )
    entropy = prefill["entropy"]
    return (
        f'<p class="prefill">After {counted(num_prompt_tokens, "prompt token")} the target expects {tokens}; '
        f'entropy <span data-figure="entropy" data-value="{entropy!r}">{entropy:.2f}</span> nats.</p>'
    )


def _where(facts: dict[str, Any]) -> str:
    parts = [facts.get("target"), facts.get("dtype"), facts.get("device")]
    if facts.get("device") == "CPU":
        parts[-1] = f"CPU, {counted(facts.get('num_threads', 1), 'thread')}"
    return ", ".join(str(part) for part in parts if part)


def _text(text: str) -> str:
    """As it stands. A carriage return would become a line feed when the page is parsed."""
    return escape(text, quote=False).replace("\r", "&#13;")


def _attribute(text: str) -> str:
    return escape(text, quote=True)


def _visible(text: str) -> str:
    """A short text on one line, its white space and line ends to be seen."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") if not text.strip() else text.replace("\n", "↵")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# What a token's tip begins with.
_KINDS = {"accepted": "accepted draft", "copied": "accepted copy", "own": "the target's own token"}
_SHAPES = (
    '<svg width="0" height="0" class="shapes" aria-hidden="true"><defs>'
    '<rect id="cell-accepted" x="1" y="1" width="10" height="8" rx="1.5" class="s-accepted"/>'
    '<rect id="cell-copied" x="2" y="2" width="8" height="6" rx="1.5" class="s-copied"/>'
    '<circle id="cell-own" cx="6" cy="5" r="3.2" class="s-own"/>'
    '<path id="cell-rejected" d="M3 2 L9 8 M9 2 L3 8" class="s-rejected"/>'
    '<path id="cell-unverified" d="M3.5 5 H8.5" class="s-unverified"/>'
    "</defs></svg>"
)


def _sample(kind: str) -> str:
    return f'<svg width="{_CELL_WIDTH}" height="{_CELL_HEIGHT}" aria-hidden="true"><use href="#legend-{kind}"/></svg>'


LEGEND = (
    f"{_SHAPES.replace('cell-', 'legend-')}"
    '<ul class="legend" aria-label="Legend">'
    f'<li>{_sample("accepted")}<span class="accepted">accepted</span> draft</li>'
    f'<li>{_sample("copied")}<span class="copied">copied</span> from the text so far</li>'
    f'<li>{_sample("own")}<span class="own">target&rsquo;s own</span> token</li>'
    f"<li>{_sample('rejected')}rejected</li><li>{_sample('unverified')}drafted, not verified</li>"
    '<li><span class="block-sample" aria-hidden="true"></span>a block begins</li></ul>'
)
