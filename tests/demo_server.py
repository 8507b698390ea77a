"""The Space served for tests; a test module asks for it by `pytest_plugins = ["demo_server"]`, where Gradio is."""

import pytest
from demo_pair import ready

from models import Models
from request import Limits
from session import Session


@pytest.fixture(scope="module")
def serve():
    """`serve(loaded)` to `(url, session)`; instead of models that are there, [`Models`] may be given."""
    import app

    running = []

    def serve(loaded):
        models = loaded if isinstance(loaded, Models) else ready(loaded)
        session = Session(models, Limits(max_new_tokens=400, max_prompt_tokens=200))
        demo = app.build(session)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("GRADIO_SERVER_PORT", "PORT"):
                patch.delenv(name, raising=False)
            _, url, _ = demo.launch(**app.launch_options(), prevent_thread_lock=True, quiet=True)
        running.append(demo)
        return url, session

    yield serve
    for demo in running:
        demo.close()
