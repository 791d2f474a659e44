"""The page at `/`, in a real Chromium, against a whole server in this process."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from cascade.chain.planner import Planner
from tests.doors import House, house
from tests.router.test_http import ask

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHOT = os.environ.get("CASCADE_SCREENSHOT")  # a path to write a picture to

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def served() -> Iterator[House]:
    """All tiers take part always: on a busy machine the planner might find that they do not pay."""
    with pytest.MonkeyPatch.context() as patch, house(pass_s=0.002, pace=(1, 3, 10)) as built:
        patch.setattr(Planner, "course", lambda self, allowed, num_sessions, *, sampled: allowed)
        yield built


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, served: House) -> Iterator[Page]:
    """The page; it may not complain on its console, nor ask for anything from elsewhere."""
    complaints: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith((served.url, "data:")) else complaints.append(request.url)
    )
    page.goto(served.url)
    yield page
    page.close()
    served.settle()
    assert complaints == []


def go(page: Page, tokens: int = 60) -> None:
    page.fill("#max", str(tokens))
    page.fill("#temperature", "0.8")
    page.click("#go")
    expect(page.locator("#go")).to_be_enabled(timeout=60_000)


def test_answer_is_coloured_by_history(page: Page, served: House) -> None:
    """Guards the page: the text is the server's, each token says its tier, lanes and figures are filled."""
    go(page)
    asked = {"prompt": page.input_value("#prompt"), "max_tokens": 60, "temperature": 0.8, "seed": 1, "history": True}
    choice = ask(served, "/v1/completions", asked)[2]["choices"][0]
    tokens = page.locator("#answer .t")
    written = "".join(tokens.all_text_contents())
    assert written == choice["text"]
    classes = [token.split()[1:2] for token in tokens.evaluate_all("all => all.map(one => one.className)")]
    assert {level for [level] in classes} <= {"l0", "l1", "l2", "l3"}
    assert len(classes) == len(choice["cascade"]["token_ids"])
    assert page.locator(".lane").count() == 4
    assert page.locator("#edges .bar").count() >= 1
    assert float(page.inner_text("#passes")) >= 1
    assert page.inner_text("#count") == str(len(classes))


def streamed(*pieces: dict[str, Any]) -> str:
    """A watched answer as the server streams it, of what its pieces say of themselves."""
    choices = [{"index": 0, "text": "x" * len(piece["token_ids"]), "cascade": piece} for piece in pieces]
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"


def test_broken_answer_goes_on(page: Page, served: House) -> None:
    """Guards readers against a router that dies: the page asks for the rest, behind the tokens that it shows."""
    bodies: list[Any] = []

    def breaking(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        if len(bodies) == 2:
            error = {"error": {"message": "The server is shutting down", "code": "unavailable"}}
            route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(error)}\n\n")
            return
        said = route.fetch().text().split("\n\n")
        kept = said[: len(said) // 2] if len(bodies) == 1 else said
        route.fulfill(content_type="text/event-stream", body="\n\n".join([*kept, ""]))

    page.route("**/v1/completions", breaking)
    go(page)
    asked = {"prompt": page.input_value("#prompt"), "max_tokens": 60, "temperature": 0.8, "seed": 1, "history": True}
    choice = ask(served, "/v1/completions", asked)[2]["choices"][0]
    assert "".join(page.locator("#answer .t").all_text_contents()) == choice["text"]
    assert page.inner_text("#count") == str(len(choice["cascade"]["token_ids"]))
    [had] = bodies[1]["resume"]["token_ids"]
    assert had == choice["cascade"]["token_ids"][: len(had)]
    assert 0 < len(had) < len(choice["cascade"]["token_ids"])
    assert bodies[2] == bodies[1]
    assert page.locator("#error").is_hidden()


def lane(tier: str, start: int, tokens: list[int], parents: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"tier": tier, "start": start, "tokens": tokens, "parents": parents}


def lanes(page: Page, name: str) -> list[int]:
    """A figure of each lane, the full tier's first."""
    figures: list[int] = page.locator(".lane").evaluate_all(f"all => all.map(one => +one.dataset.{name})")
    return figures


def test_guesses_run_ahead_and_roll_back(page: Page) -> None:
    """Guards the live lanes: who drafts is ahead by its guesses, those that the text contradicts fall, none outlive the end.

    The answer is made up: how far tiers run ahead of a real one, and what is rolled back, is for the machine to say.
    """
    medium, tiny = lane("medium", 1, [6, 7]), lane("tiny", 3, [8, 9, 10])
    edge = {"drafter": "medium", "verifier": "full", "passes": 3, "proposed": 3, "accepted": 2}
    answer = streamed(
        {"token_ids": [5], "ends": [1], "origins": [4], "lanes": [medium, tiny]},
        # 6 is as guessed; 99 in place of 7 takes with it what tiny wrote behind it, and medium begins again
        {"token_ids": [6, 99], "ends": [1, 2], "origins": [2, 5], "lanes": [lane("medium", 3, [20])]},
        {"token_ids": [20], "ends": [1], "origins": [2], "edges": [edge], "seed": 1},
    )
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=answer))
    go(page)
    assert lanes(page, "ahead") == [0, 2, 3, 0]
    assert lanes(page, "fallen") == [0, 1, 3, 0]
    assert page.inner_text("#count") == "4"


def test_branches_come_true(page: Page) -> None:
    """Guards what is shown of trees: a runner-up is no guess that falls, and it stays once the answer takes its way.

    ``medium`` offers 9 in place of 7, with 8 and then 5 behind it; ``tiny`` offers 9 at the same place of another text.
    """
    tree = lane("medium", 1, [6, 7, 9, 8, 5, 99], (-1, 0, 0, 2, 3, -1))
    answer = streamed(
        {"token_ids": [5], "ends": [1], "origins": [4], "lanes": [tree, lane("tiny", 1, [3, 4, 9], (-1, 0, 0))]},
        {"token_ids": [6, 9], "ends": [1, 2], "origins": [2, 2], "lanes": [lane("medium", 3, [8, 5])]},
        {"token_ids": [8, 4], "ends": [1, 2], "origins": [2, 5], "seed": 1, "edges": [branched()]},
    )
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=answer))
    go(page)
    assert lanes(page, "came") == [0, 2, 0, 0]
    assert lanes(page, "ahead") == [0, 2, 2, 0]
    assert lanes(page, "fallen") == [0, 1, 2, 0]
    assert page.locator("#edges").inner_text().split("\n") == ["medium → full", "67 % kept", "corrections ready", "1 of 2"]


def branched() -> dict[str, Any]:
    counts = {"passes": 3, "proposed": 3, "accepted": 2, "corrected": 2, "prepared": 1}
    return {"drafter": "medium", "verifier": "full", **counts}


def test_lanes_end_with_the_answer(page: Page) -> None:
    """Guards the lanes of real answers: the full tier's word is the last, nothing is ahead of the end, nor if it is alone."""
    go(page, 120)
    assert lanes(page, "ahead")[0] == lanes(page, "fallen")[0] == 0
    assert page.evaluate("lanes.length") == 0
    deadline = time.monotonic() + 60
    while page.evaluate("fallen.length"):  # they fade; the page's policy forbids `wait_for_function`, which evaluates there
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)
    page.click(".switch")
    go(page, 30)
    assert lanes(page, "ahead") == [0, 0, 0, 0]


def test_switch_turns_drafts_off(page: Page) -> None:
    """Guards the switch: the same text, every token said by the full tier, and both speeds side by side."""
    go(page)
    cascaded = page.locator("#answer").inner_text()
    page.click(".switch")
    go(page)
    assert page.locator("#answer").inner_text() == cascaded
    assert page.locator("#answer .l0, #answer .l1").count() == 0
    assert page.locator("#compare .bar").count() == 2


def test_stop_frees_every_tier(page: Page, served: House) -> None:
    """Guards against answers that go on when the visitor has had enough; the fixture looks at every tier."""
    page.fill("#max", "3500")
    page.click("#go")
    expect(page.locator("#answer .t")).not_to_have_count(0, timeout=30_000)
    page.click("#stop")
    expect(page.locator("#go")).to_be_enabled(timeout=30_000)
    assert page.locator("#error").is_hidden()


def test_refusals_are_shown(browser: Browser, served: House) -> None:
    """Guards visitors: the server's sentence, as text."""
    page = browser.new_page()
    page.goto(served.url)
    page.fill("#max", "99999")
    page.click("#go")
    expect(page.locator("#error")).to_contain_text("99999")
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(browser: Browser, served: House, scheme: str) -> None:
    """Guards contrast in both schemes: every text at least 4.5 to 1 against what is behind it; nothing overflows a phone."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 800})
    page.goto(served.url)
    go(page, 30)
    ratios = page.evaluate(CONTRAST)
    assert min(ratios.values()) >= 4.5, ratios
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


CONTRAST = """() => {
  const channel = (v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  const pixel = (colours) => {
    const pen = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return pen.getImageData(0, 0, 1, 1).data;
  };
  const light = (d) => .2126 * channel(d[0]) + .7152 * channel(d[1]) + .0722 * channel(d[2]);
  const found = {};
  const queries = ['#served', '#answer .t', '#answer .prompt', '.legend .t', '.note', 'label', '#speed', '.lane b', '#go'];
  for (const query of queries) {
    for (const one of document.querySelectorAll(query)) {
      const behind = [];
      for (let node = one; node; node = node.parentElement) behind.unshift(getComputedStyle(node).backgroundColor);
      const [back, front] = [light(pixel(behind)), light(pixel([...behind, getComputedStyle(one).color]))];
      const ratio = (Math.max(back, front) + .05) / (Math.min(back, front) + .05);
      found[query] = Math.min(found[query] ?? 99, ratio);
    }
  }
  return found;
}"""


@pytest.mark.skipif(SHOT is None, reason="set CASCADE_SCREENSHOT to a path, and CASCADE_URL to a running server")
def test_picture(browser: Browser) -> None:
    """Takes the picture of the README from a running server; it must stay small."""
    page = browser.new_page(viewport={"width": 1120, "height": 1000}, device_scale_factor=1)
    page.goto(os.environ["CASCADE_URL"])
    for _ in range(4):  # twice each, so that both are warm
        page.click(".switch")
        page.click("#go")
        expect(page.locator("#go")).to_be_enabled(timeout=120_000)
    page.wait_for_timeout(500)
    assert SHOT is not None
    page.screenshot(path=SHOT, full_page=True)
    assert Path(SHOT).stat().st_size < 300_000
