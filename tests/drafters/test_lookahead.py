"""Lookahead: windows are what passes make of them, and what passes say in them is known from then on."""

import random

from cascade.draft import NO_DRAFT, Draft
from cascade.drafters.lookahead import BESIDE, GRAM, LONGEST_PAUSE, MAX_KNOWN, READ, SAID, SETTLED, WINDOW, Grams, Lookahead
from cascade.scorer import Scored

SIZE = 97


def next_of(token: int) -> int:
    """What a model says that looks at one token: all others before the same comes again."""
    return token * 5 % SIZE


def scored(last: int, draft: Draft) -> Scored:
    """What it says of a draft, all of it."""
    return Scored([next_of(token) for token in (last, *draft.tokens)])


def window_of(draft: Draft) -> list[int]:
    """Tokens of the last line of a draft."""
    return [draft.tokens[node] for node in draft.way(len(draft) - 1)]


def test_own_tokens_behind_wrong_guesses_are_the_next_guesses() -> None:
    """Guards Jacobi iteration: each guess is what the last pass said at its position, whatever stood there."""
    looker, text = Lookahead().begin(""), [1, 2, 3]
    first = looker.guess(text, 0, 16)
    guesses = window_of(first)
    assert len(guesses) == WINDOW
    assert {*guesses} <= {*text}
    looker.observe(3, first, scored(3, first))
    text.append(next_of(3))
    second = looker.guess(text, 3, 16)
    assert window_of(second) == [next_of(token) for token in guesses]
    assert {*second.confidences} == {SAID}


def test_guesses_that_stay_are_settled() -> None:
    """Guards confidences: what two passes in a row say of a position is likelier to be right."""
    looker = Lookahead().begin("")
    first = looker.guess([7], 0, 16)
    said = Scored([8] * (1 + len(first)))
    looker.observe(7, first, said)
    second = looker.guess([7, 8], 1, 16)
    assert {*second.confidences} == {SAID}
    looker.observe(8, second, Scored([8] * (1 + len(second))))
    assert looker.guess([7, 8, 8], 2, 16).confidences[-2] == SETTLED


def test_what_the_text_has_never_said_is_known() -> None:
    """Guards n-grams: chains of what passes said in windows are guesses after their first token, before the text has them."""
    looker, text = Lookahead().begin(""), [1, 96, 35]
    right = passes = 0
    since = 0
    while len(text) < SIZE - 10:  # as long as no token comes twice
        draft = looker.guess(text, since, 16)
        pass_ = scored(text[-1], draft)
        new, path = draft.walk(pass_.own)
        looker.observe(text[-1], draft, pass_)
        since = len(text)
        text += new
        right, passes = right + len(path), passes + 1
    assert right > passes / 4


def test_a_window_that_is_not_scored_rests() -> None:
    """Guards speed where guesses cost: what no pass scores is offered ever more seldom, and each time once it is."""
    looker, text, offered = Lookahead().begin(""), [*range(10, 30)], []
    for place in range(600):
        draft = looker.guess(text, len(text) - 1, 16)
        offered.append(bool(draft))
        looker.observe(text[-1], NO_DRAFT, Scored([30 + place]))
        text.append(30 + place)
    assert 600 / LONGEST_PAUSE <= sum(offered) <= 600 / LONGEST_PAUSE + 10
    assert offered[0]
    while not (draft := looker.guess(text, len(text), 16)):
        looker.observe(text[-1], NO_DRAFT, Scored([0]))
    looker.observe(text[-1], draft, Scored([0] * (1 + len(draft))))
    assert looker.guess(text, len(text), 16)


def test_parts_of_windows_may_be_scored() -> None:
    """Guards passes that can afford the first guesses alone, or that offer them among others: the rest stays where it is."""
    looker = Lookahead().begin("")
    first = looker.guess([5, 6], 0, 16)
    guesses = window_of(first)
    tree = Draft((90, *guesses[:2], 91), bytes(4), b"", (-1, -1, 1, -1))
    looker.observe(6, tree, Scored([50, 51, 52, 53, 54]))
    assert window_of(looker.guess([5, 6, 50], 2, 16))[:4] == [52, 53, guesses[3], guesses[4]]


def test_what_was_cut_is_not_gone_on_with() -> None:
    """Guards corrections: a window after another text is none after this."""
    looker = Lookahead().begin("")
    first = looker.guess([5, 6], 0, 16)
    looker.observe(6, first, Scored([60] * (1 + len(first))))
    looker.cut()
    assert 60 not in looker.guess([5, 7], 1, 16).tokens


def test_guesses_are_trees_of_all_depths() -> None:
    """Guards drafts: no deeper than asked for, each line once."""
    chance = random.Random(2)
    looker, text = Lookahead().begin(""), [chance.randrange(4) for _ in range(60)]
    assert looker.guess(text, 0, 0) == NO_DRAFT
    for most in (1, 2, 3, 16):
        draft = looker.guess(text, len(text), most)
        assert draft.height <= most
        assert len({(draft.parent(node), token) for node, token in enumerate(draft.tokens)}) == len(draft)


def test_memory_is_bounded() -> None:
    """Guards servers: of a tenant so many n-grams, of a first token the latest, of a long prompt its end."""
    grams = Grams()
    for token in range(MAX_KNOWN + 10):
        for other in range(2 * BESIDE):
            grams.saw((token, *range(other, other + GRAM - 1)))
    assert len(grams) == MAX_KNOWN
    assert [line[0] for line, _ in grams.behind(MAX_KNOWN)] == [2 * BESIDE - 1 - place for place in range(BESIDE)]
    grams.saw((MAX_KNOWN, *range(2 * BESIDE - 2, 2 * BESIDE + GRAM - 3)))
    assert grams.behind(MAX_KNOWN)[0][1] == 2, "it came again"
    drafter = Lookahead()
    drafter.begin("").guess([*range(READ + 100)], 0, 4)
    assert READ - GRAM < len(drafter.tenants.of("")) <= READ


def test_tenants_never_hear_of_each_other() -> None:
    """Guards secrets: n-grams of one tenant's texts are no guesses for another's."""
    drafter, secret = Lookahead(), [*range(100, 120)]
    drafter.begin("a").guess(secret, 0, 4)
    assert drafter.begin("a").guess([1, 105], 0, 4).tokens[:4] == (106, 107, 108, 109)
    assert not {*secret[6:]} & {*drafter.begin("b").guess([1, 105], 0, 4).tokens}
