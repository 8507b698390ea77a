"""Pictures of the page: `python demo/screenshots.py FOLDER [--url URL]`.

Starts the Space unless a URL is given, and drives a Chromium that is installed (`CHROMIUM` names another one): the page
empty, in the middle of an answer and with its result, at desktop and phone widths, light and dark.
"""

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium of this machine, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise FileNotFoundError("No Chromium was found. Install one, or name its program in `CHROMIUM`.")
    with sync_playwright() as playwright:
        # Without a sandbox it also runs as root, as in containers; it visits one page only, our own.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


def take(chromium: Any, url: str, folder: Path, *, timeout_s: float = 300.0) -> list[Path]:
    """All the pictures, whole pages."""
    taken = []
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        for size, (width, height) in SIZES.items():
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.set_default_timeout(timeout_s * 1000)
            page.goto(f"{url}?__theme={scheme}")

            def shoot(moment: str, page: Any = page, name: str = f"{size}-{scheme}") -> None:
                taken.append(folder / f"{name}-{moment}.png")
                page.screenshot(path=taken[-1], full_page=True)

            page.wait_for_selector("#run:not([disabled])")
            shoot("1-empty")
            page.click("#examples button:has-text('Code')")
            page.wait_for_function("document.querySelector('#prompt textarea').value.startsWith('Write')")
            page.check("#compare input")
            page.click("#run")
            page.wait_for_function("document.querySelectorAll('#answer .block').length > 6")
            shoot("2-answering")
            page.wait_for_selector("#verdict")
            page.wait_for_selector("#run:not([disabled])")
            shoot("3-result")
            page.click("#settings button")
            page.click("#rule label:has-text('Fixed size')")
            page.wait_for_selector("#block-size input[type=range]")
            page.click("#result summary >> nth=0")
            page.hover("#answer .accepted >> nth=0")
            shoot("4-settings")
            page.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", help="of a running Space; by default one is started")
    arguments = parser.parse_args()
    with browser() as chromium:
        if arguments.url:
            taken = take(chromium, arguments.url, arguments.folder)
        else:
            import app

            session = app.session_from_environment()
            demo = app.build(session)
            session.models.load_in_background()
            _, url, _ = demo.launch(**app.launch_options(), prevent_thread_lock=True, quiet=True)
            try:
                taken = take(chromium, url, arguments.folder)
            finally:
                demo.close()
    print("\n".join(map(str, taken)))


if __name__ == "__main__":
    main()
