"""The Space's server, by its client: the API, the queue, many visitors, and what building the page costs."""

import gc
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from conftest import plain_generate
from demo_pair import tiny_pair, writing_pair

from blockpilot_hf.prompts import encode_prompt

gr = pytest.importorskip("gradio")
gradio_client = pytest.importorskip("gradio_client")

import app  # noqa: E402  # needs gradio
import page  # noqa: E402
from request import FIXED, Limits, Request  # noqa: E402

pytest_plugins = ["demo_server"]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny(serve):
    return serve(tiny_pair())


def client_of(url):
    return gradio_client.Client(url, verbose=False)


def test_the_endpoints_have_named_fields(tiny):
    endpoints = client_of(tiny[0]).view_api(return_format="dict")["named_endpoints"]
    assert set(endpoints) == {"/generate", "/info"}
    names = [parameter["parameter_name"] for parameter in endpoints["/generate"]["parameters"]]
    assert names == ["prompt", "max_new_tokens", "temperature", "seed", "rule", "block_size", "compare"]
    types = [output["python_type"]["type"] for output in endpoints["/generate"]["returns"]]
    assert types[0] == "str" and types[1].startswith("dict") and len(types) == 2
    text = (ROOT / "demo" / "README.md").read_text(encoding="utf-8")
    assert all(f"    {name}=" in text for name in names)


def test_the_api_gives_text_and_trace(tiny):
    url, session = tiny
    text, trace = client_of(url).predict(prompt="abc", max_new_tokens=20, seed=3, temperature=1.0, api_name="/generate")
    *_, answer = session.run(Request("abc", max_new_tokens=20, seed=3, temperature=1.0))
    assert text == answer.text and trace["token_ids"] == answer.token_ids
    expected = answer.record()
    for name in ("block_size", "acceptance_length", "num_new_tokens", "finish", "state", "reason", "request", "models"):
        assert trace[name] == expected[name]
    assert [s["draft_ids"] for s in trace["steps"]] == [list(s.draft_ids) for s in answer.trace.steps]
    assert {int(size): score for size, score in trace["scores"].items()} == answer.trace.scores
    assert trace["plain"] is None and trace["total_s"] > 0
    defaults = client_of(url).predict(prompt="abc", api_name="/generate")[1]["request"]
    assert Request(**defaults) == Request("abc")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": "a" * 300}, "has 302 tokens, and 200 are allowed"),
        ({"max_new_tokens": 401}, "from 1 to 400"),
        ({"rule": "fast"}, "`rule` must be one of"),
    ],
)
def test_the_apis_errors_say_what_is_allowed(tiny, bad, message):
    with pytest.raises(gradio_client.exceptions.AppError, match=message):
        client_of(tiny[0]).predict(**{"prompt": "abc", **bad}, api_name="/generate")
    assert client_of(tiny[0]).predict(prompt="abc", max_new_tokens=2, api_name="/generate")[1]["state"] == "done"


def test_a_failure_is_the_apis_error_too(serve):
    loaded = writing_pair()
    url, _ = serve(loaded)
    hook = loaded.target.register_forward_pre_hook(lambda *args: (hook.remove(), 1 / 0))
    with pytest.raises(gradio_client.exceptions.AppError, match="division by zero"):
        client_of(url).predict(prompt="abc", api_name="/generate")
    assert client_of(url).predict(prompt="abc", rule=FIXED, api_name="/generate")[1]["state"] == "done"


def eventually(condition, timeout_s=30.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def test_a_cancelled_call_frees_the_model_and_the_next_one_runs(serve):
    url, session = serve(writing_pair(ends=False, seconds_per_pass=0.1))
    client = client_of(url)
    job = client.submit(prompt="abc", max_new_tokens=400, rule=FIXED, block_size=2, api_name="/generate")
    eventually(lambda: len(job.outputs()) > 3)
    assert client_of(url).predict(api_name="/info")["is_busy"]  # a light request answers meanwhile
    job.cancel()
    eventually(lambda: not session.info()["is_busy"], 5)
    trace = client_of(url).predict(prompt="abc", max_new_tokens=3, api_name="/generate")[1]
    assert trace["num_new_tokens"] == 3
    texts = [text for text, _ in job.outputs()]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    eventually(lambda: not any(thread.name == "decode" for thread in threading.enumerate()))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_twenty_visitors_at_once_get_their_own_answers(tiny):
    """Twice: what the first twenty leave behind is caches, what the second leave would be a leak."""
    url, session = tiny
    loaded = session.models.get()
    expected = {}
    for i in range(20):
        ids = encode_prompt(loaded.tokenizer, f"visitor {i}")
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 30}
        new = plain_generate(loaded.target, ids, seed=i, **settings)[0, ids.shape[1] :]
        expected[i] = loaded.tokenizer.decode(new, skip_special_tokens=True)
    assert len(set(expected.values())) == 20
    levels, light = [], []
    for _ in range(2):
        clients = [client_of(url) for _ in range(20)]
        jobs = [
            client.submit(
                prompt=f"visitor {i}", max_new_tokens=30, temperature=1.0, seed=i, rule=app.RULE_CHOICES[i % 3][1],
                api_name="/generate",
            )
            for i, client in enumerate(clients)
        ]  # fmt: skip
        start = time.monotonic()
        assert client_of(url).predict(api_name="/info")["state"] == "ready"
        light.append((time.monotonic() - start, sum(job.done() for job in jobs)))
        assert {i: job.result(timeout=120)[0] for i, job in enumerate(jobs)} == expected
        del clients, jobs
        gc.collect()
        levels.append(resident_bytes())
    assert light[0][1] < 20, "all were done before the light request was"
    assert levels[1] - levels[0] < 40 * 2**20
    assert not session.info()["is_busy"] and not any(thread.name == "decode" for thread in threading.enumerate())


def test_the_page_and_the_api_draw_from_one_answer(tiny):
    """What the page shows for a request is in the trace that the API returns for it."""
    url, session = tiny
    text, trace = client_of(url).predict(prompt="abc", max_new_tokens=25, compare=True, api_name="/generate")
    *_, answer = session.run(Request("abc", max_new_tokens=25, compare=True))
    shown = "".join(app.draw(session, answer))
    values = dict(re.findall(r'data-figure="(\w+)" data-value="([^"]+)"', shown))
    assert float(values["tau"]) == trace["acceptance_length"] and int(values["steps"]) == len(trace["steps"])
    assert float(values["entropy"]) == trace["prefill"]["entropy"]
    assert f'data-value="{trace["block_size"]}"' in page.decision(answer) and text == answer.text


# Starting


def test_building_the_page_loads_and_fetches_nothing(tmp_path):
    """As on the Hub, where `SPACE_ID` is set: no model, no cached examples, no connection."""
    code = (
        "import socket, sys\n"
        "def refuse(*args): raise AssertionError(f'a connection to {args}')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import app\n"
        "session = app.session_from_environment()\n"
        "demo = app.build(session)\n"
        "app.launch_options()\n"
        "print(session.models.state, len(demo.fns))\n"
    )
    environment = {
        **os.environ,
        "SPACE_ID": "you/blockpilot",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not loaded")
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and f.suffix in (".safetensors", ".csv", ".gguf")]


def test_the_port_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("GRADIO_SERVER_PORT", raising=False)
    monkeypatch.delenv("PORT", raising=False)
    assert app.launch_options()["server_port"] is None  # 7860, or the next one that is free
    monkeypatch.setenv("PORT", "8123")
    assert app.launch_options()["server_port"] == 8123
    monkeypatch.setenv("GRADIO_SERVER_PORT", "8124")
    assert app.launch_options()["server_port"] is None  # Gradio reads that one


def test_examples_are_of_different_kinds_and_within_the_limits():
    assert len(app.EXAMPLES) >= 6 and len(set(app.EXAMPLES.values())) == len(app.EXAMPLES)
    assert [rule for _, rule in app.RULE_CHOICES] == ["in flight", "by seconds", "paper", "fixed size"]
    for prompt in app.EXAMPLES.values():
        Request(prompt).checked(Limits())


# The folder as a repository


def front_matter():
    return yaml.safe_load((ROOT / "demo" / "README.md").read_text(encoding="utf-8").split("---\n")[1])


def test_the_readme_is_a_spaces_card():
    from huggingface_hub import SpaceCardData

    fields = front_matter()
    card = SpaceCardData(**fields)
    assert (card.sdk, card.license) == ("gradio", "apache-2.0")
    assert (ROOT / "demo" / fields["app_file"]).is_file()
    assert isinstance(fields["sdk_version"], str) and isinstance(fields["python_version"], str)
    assert len(fields["short_description"]) <= 60 and fields["models"] and fields["tags"]
    assert None not in fields.values()


def test_the_sdk_version_is_one_that_the_extra_allows():
    from packaging.requirements import Requirement

    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (gradio,) = (Requirement(line) for line in project["optional-dependencies"]["demo"])
    assert gradio.name == "gradio" and gradio.specifier.contains(front_matter()["sdk_version"])


def test_the_requirements_are_the_packages():
    from packaging.requirements import Requirement

    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "demo" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert sorted(map(str, listed)) == sorted(str(Requirement(line)) for line in project["dependencies"])
    assert "gradio" not in [requirement.name for requirement in listed]


def test_only_the_interface_needs_gradio():
    for file in (ROOT / "demo").glob("*.py"):
        uses = re.findall(r"^\s*(?:import|from) gradio", file.read_text(encoding="utf-8"), flags=re.M)
        assert bool(uses) == (file.name == "app.py"), file.name
