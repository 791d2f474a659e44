"""The page at `/`, a chat, in a real Chromium, against a whole server in this process."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from cascade.messages import origin, origin_level
from cascade.planner.chains import Planner
from tests.http.test_http import ask
from tests.in_process import House, house
from tests.waiting import LONG_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
CHAT = "/v1/chat/completions"
FIRST, SECOND = "def pop(self):", "And now <b>push</b>"
LEVELS = ("suffix", "tiny", "medium", "full")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def served() -> Iterator[House]:
    """All tiers take part always: on a busy machine the planner might find that they do not pay."""
    with pytest.MonkeyPatch.context() as patch, house(pass_s=0.0005, pace=(1, 3, 10)) as built:
        patch.setattr(Planner, "chain", lambda self, allowed, *load, **kind: allowed)
        yield built


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        expect.set_options(timeout=1e3 * LONG_S)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, served: House) -> Iterator[Page]:
    """The page; but for refusals it may not complain on its console, nor ask for anything from elsewhere."""
    complaints: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(1e3 * LONG_S)
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" and "400" not in said.text else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda to: None if to.url.startswith((served.url, "data:")) else complaints.append(to.url))
    page.goto(served.url)
    yield page
    page.close()
    served.settle()
    assert complaints == []


def choose(page: Page, **settings: str) -> None:
    if not page.locator("#settings").is_visible():
        page.click("form summary")
    for name, value in settings.items():
        page.fill(f"#{name}", value)


def send(page: Page, text: str, tokens: int, seed: str = "1") -> None:
    choose(page, max=str(tokens), temperature="0.8", seed=seed)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def say(page: Page, text: str = FIRST, tokens: int = 40, seed: str = "1") -> None:
    """Send ``text`` and wait until nothing is written any more."""
    send(page, text, tokens, seed)
    settled(page)


def settled(page: Page) -> None:
    expect(page.locator("#go")).to_have_text("Send")


def answer_of(page: Page) -> str:
    text: str = page.evaluate("turns.at(-1).text")
    return text


def figure(page: Page, name: str) -> str:
    return page.locator(f".{name}").last.inner_text()


def history(page: Page, words: str) -> list[int]:
    """What the rows of the last answer say in ``words``, the full tier's first."""
    label = page.locator(".tracks").last.get_attribute("aria-label") or ""
    assert [part.split(":")[0] for part in label.split("; ")] == list(reversed(LEVELS))
    return [int(number) for number in re.findall(words.replace("N", r"(\d+)"), label)]


def expected(served: House, *messages: str, tokens: int = 40, system: str = "") -> Any:
    """What the API says to the same conversation: its only choice."""
    turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(messages)]
    turns = [{"role": "system", "content": system}, *turns] if system else turns
    request = {"messages": turns, "max_tokens": tokens, "temperature": 0.8, "seed": 1, "history": True}
    return ask(served, CHAT, request)[2]["choices"][0]


def test_answer_is_the_servers_and_coloured(page: Page, served: House) -> None:
    """Guards the page: the text is the server's, each token says its tier in colour and words, rows and figures are filled."""
    say(page)
    choice = expected(served, FIRST)
    assert answer_of(page) == choice["message"]["content"]
    tokens = page.locator(".said .t")
    drawn_levels = tokens.evaluate_all("all => all.map(one => +one.className.match(/l(\\d)/)[1])")
    levels = [origin_level(byte) for byte in choice["cascade"]["origins"]]
    titles = tokens.evaluate_all("all => all.map(one => one.title.split(' ')[0])")
    assert titles == [LEVELS[level] for level in drawn_levels]
    colours = page.locator("#legend .t").evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == len(LEVELS)
    drawn = tokens.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert drawn == [colours[level] for level in drawn_levels]
    assert page.locator("#legend").inner_text().split("\n")[:4] == ["Whose guess survived:", *LEVELS[:3]]
    assert sum(history(page, "N of")) == len(levels)
    assert figure(page, "edges") != ""  # shares, or why there are none: on a busy machine guesses may come too late
    assert float(figure(page, "passes")) >= 1
    assert figure(page, "count") == str(len(levels))


def test_conversations_have_a_history_and_survive_a_reload(page: Page, served: House) -> None:
    """Guards the second turn, and visitors against a lost conversation: after a reload it is drawn again, and goes on."""
    choose(page, system="Be brief.")
    say(page)
    first, drawn, tracks = answer_of(page), page.locator(".said").inner_html(), page.locator(".tracks").inner_html()
    assert first == expected(served, FIRST, system="Be brief.")["message"]["content"]
    page.reload()
    expect(page.locator("article")).to_have_count(1)
    assert (answer_of(page), page.locator(".said").inner_html(), page.locator(".tracks").inner_html()) == (first, drawn, tracks)
    page.locator(".compare").click()
    settled(page)
    assert figure(page, "verdict").startswith("The same text")
    say(page, SECOND)
    assert answer_of(page) == expected(served, FIRST, first, SECOND, system="Be brief.")["message"]["content"]
    assert page.locator(".asked").all_text_contents() == [FIRST, SECOND]
    assert page.locator(".asked b").count() == 0
    assert page.locator("#prompt").input_value() == ""
    page.click("#new")
    page.reload()
    expect(page.locator("#served")).not_to_be_empty()
    assert page.locator("article, .asked").count() == 0
    say(page, SECOND)
    assert answer_of(page) == expected(served, SECOND, system="Be brief.")["message"]["content"]


def test_model_without_a_template_completes(page: Page, served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards base models: what is sent begins a text, and what is sent next goes on with all of it."""
    monkeypatch.setattr(served.router.model.tokenizer, "chat_template", None)
    page.reload()
    text = ""
    for words in (FIRST, SECOND):
        say(page, words)
        request = {"prompt": text + words, "max_tokens": 40, "temperature": 0.8, "seed": 1}
        answer = ask(served, "/v1/completions", request)[2]["choices"][0]["text"]
        assert answer_of(page) == answer
        text += words + answer
    expect(page.locator("#system")).to_be_hidden()


def streamed(*pieces: dict[str, Any]) -> str:
    """An answer as the server streams it, of what its pieces say of themselves."""
    texts = [piece.get("text", "x" * len(piece["token_ids"])) for piece in pieces]
    choices = [{"index": 0, "delta": {"content": text}, "cascade": piece} for text, piece in zip(texts, pieces, strict=True)]
    choices[-1]["finish_reason"] = "stop"
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"


def answer_with(page: Page, body: str) -> None:
    """Every answer is ``body``: who guesses what in a real one is for the machine to say."""
    page.route(f"**{CHAT}", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def test_broken_answer_goes_on(page: Page, served: House) -> None:
    """Guards readers against a router that dies: the page asks for the rest, after the tokens that it shows."""
    bodies: list[Any] = []

    def breaking(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        if len(bodies) == 2:
            error = {"error": {"message": "The server is shutting down", "code": "unavailable"}}
            route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(error)}\n\n")
            return
        pieces = route.fetch().text().split("\n\n")
        kept = pieces[: len(pieces) // 2] if len(bodies) == 1 else pieces
        route.fulfill(content_type="text/event-stream", body="\n\n".join([*kept, ""]))

    page.route(f"**{CHAT}", breaking)
    say(page)
    choice = expected(served, FIRST)
    assert answer_of(page) == choice["message"]["content"]
    assert figure(page, "count") == str(len(choice["cascade"]["token_ids"]))
    [had] = bodies[1]["resume"]["token_ids"]
    assert had == choice["cascade"]["token_ids"][: len(had)]
    assert 0 < len(had) < len(choice["cascade"]["token_ids"])
    assert bodies[2] == bodies[1]
    assert page.locator("#error").is_hidden()


def test_tokens_are_drawn_in_the_rows_of_their_tiers(page: Page) -> None:
    """Guards what is drawn of an answer: who said each token, what was replaced; no text of a model becomes markup."""
    markup = "<img src=x onerror=alert(1)>"
    counts = {"passes": 3, "proposed": 3, "accepted": 2, "corrected": 2, "prefetched": 1}
    edge = {"drafter": "medium", "verifier": "full", **counts}
    answer = streamed(
        {"token_ids": [5], "ends": [1], "origins": [origin(1)]},
        {"token_ids": [6, 99], "ends": [1, 2], "origins": [origin(2), origin(3, replaced=0)]},
        {"token_ids": [20], "ends": [len(markup)], "origins": [origin(2)], "edges": [edge], "seed": 1, "text": markup},
    )
    answer_with(page, answer)
    say(page)
    assert page.locator(".said").last.inner_text() == answer_of(page) == "xxx" + markup
    assert page.locator(".said img").count() == 0
    assert history(page, "N of 4 tokens") == [1, 2, 1, 0]
    assert history(page, "N replaced") == [0, 0, 0, 1]
    titles = page.locator(".said .t").evaluate_all("all => all.map(one => one.title)")
    assert titles == ["tiny guessed it", "medium guessed it", "full corrected suffix", "medium guessed it"]
    assert figure(page, "count") == "4"
    assert figure(page, "edges").split("\n") == ["medium → full", "67 %", "corrections ready", "1 of 2"]


@pytest.mark.parametrize("seed", ["", "9223372036854775807"])
def test_comparison_with_the_full_model_alone(page: Page, seed: str) -> None:
    """Guards the comparison, also with seeds beyond 2 to the 53rd, which JavaScript rounds: the texts differed."""
    say(page, seed=seed)
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.url.endswith(CHAT) else None)
    page.locator(".compare").click()
    settled(page)
    [body] = sent
    assert (body["speculation"], body["messages"]) == ({"mode": "off"}, [{"role": "user", "content": FIRST}])
    assert page.locator(".speeds .bar").count() == 2
    assert figure(page, "verdict").startswith(f"The same text, all {figure(page, 'count')} tokens")
    assert page.evaluate("turns.at(-1).seed") == seed or not seed


MARKDOWN = """## Sky

A **bold** word, `code` and [a link](https://example.org/a), ![a picture](https://example.org/b.png).

```bash
bash
  a = 2
```

- one
- two
"""


def test_markdown_is_rendered_in_the_colours_of_tokens(page: Page) -> None:
    """Guards readers against raw Markdown, colours against its syntax, and privacy: a picture would ask another server."""
    cut = [piece for line in MARKDOWN.splitlines(keepends=True) for piece in re.findall(r"\s*\S+\s*", line) or [line]]
    pieces = [{"text": text, "token_ids": [7], "ends": [len(text)], "origins": [origin(n % 4)]} for n, text in enumerate(cut)]
    answer_with(page, streamed(*pieces))
    say(page)
    assert answer_of(page) == MARKDOWN
    drawn = {"h2": "Sky", "strong": "bold", "pre code": "bash\n  a = 2\n", "a": "a link", "li >> nth=1": "two"}
    for selector, text in drawn.items():
        assert page.locator(f".said {selector}").inner_text() == text
    assert page.locator(".said a").get_attribute("href") == "https://example.org/a"
    assert "![a picture](https://example.org/b.png)" in page.locator(".said").inner_text()
    for words in ("Sky", "bold", "code", "one", "bash"):
        token = max(n for n, text in enumerate(cut) if text.strip("#*`,-\n ") == words)
        coloured = page.locator(".said .t").filter(has_text=re.compile(rf"^\s*{words}\s*$")).first
        assert (coloured.get_attribute("title") or "").split()[0] == LEVELS[token % 4], words


def test_stop_frees_every_tier(page: Page) -> None:
    """Guards against answers that go on when the visitor has had enough; what has come is a part of the conversation."""
    send(page, FIRST, 3500)
    expect(page.locator(".said .t")).not_to_have_count(0)
    page.click("#go")
    settled(page)
    assert page.locator("#error").is_hidden()
    assert figure(page, "edges") == "Known only for answers that end by themselves."
    first = answer_of(page)
    with page.expect_request(f"**{CHAT}") as request:
        send(page, SECOND, 3500)
    body: Any = request.value.post_data_json
    assert [turn["content"] for turn in body["messages"]] == [FIRST, first, SECOND]
    page.press("#prompt", "Escape")
    settled(page)


def test_refusals_are_shown(page: Page, served: House) -> None:
    """Guards visitors: the server's sentence, as text, and the question is theirs again, to be sent once more."""
    say(page, tokens=-5)
    expect(page.locator("#error")).to_contain_text("-5")
    assert page.locator("article, .asked").count() == 0
    assert page.locator("#prompt").input_value() == FIRST
    say(page)
    assert answer_of(page) == expected(served, FIRST)["message"]["content"]
    expect(page.locator("#error")).to_be_hidden()


def test_a_phone_shows_all(page: Page) -> None:
    """Guards small screens, where the composer stood over the end of an answer while settings were open."""
    page.set_viewport_size({"width": 390, "height": 844})
    say(page, tokens=30)
    boxes = [page.locator(place).bounding_box() for place in ("header", "main", "footer")]
    assert all(boxes)
    edges = [(box["y"], box["y"] + box["height"]) for box in boxes if box]
    assert [edges[0][1], edges[1][1]] == pytest.approx([edges[1][0], edges[2][0]], abs=1)
    assert edges[2][1] <= 844
    page.evaluate("main.scrollTop = main.scrollHeight")
    last = page.locator(".compare").bounding_box()
    assert last
    assert last["y"] + last["height"] <= edges[2][0]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_every_control_has_a_name(page: Page) -> None:
    """Guards visitors who hear the page, or have a keyboard only: each control says what it is and can be reached."""
    say(page, tokens=10)
    page.keyboard.press("Tab")
    reached = set()
    for _ in range(30):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert {"prompt", "go", "temperature", "max", "seed", "key", "system", "compare", "new", "tracks"} <= reached
    for role, name in (("textbox", "Message"), ("button", "Send"), ("button", "New chat"), ("spinbutton", "temperature")):
        assert page.get_by_role(role, name=name, exact=True).count() == 1
    expect(page.locator("#status")).to_have_text("Answered with 10 tokens")
