"""The draft: walks, cuts and unions of trees, held against sets of paths."""

from hypothesis import given
from hypothesis import strategies as st

from cascade.draft import Draft

Path = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn, *, lines: bool = False) -> Draft:
    """Trees of up to ten nodes over four tokens, without twins: two children of one node say different things."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(draw(st.integers(0, 10))):
        parent = node - 1 if lines else draw(st.integers(-1, node - 1))
        free = [t for t in range(4) if (parent, t) not in zip(parents, tokens, strict=True)]
        if free:
            parents.append(parent if parent < len(tokens) else len(tokens) - 1)
            tokens.append(draw(st.sampled_from(free)))
    confidences = draw(st.sampled_from([b"", bytes(range(len(tokens)))]))
    return Draft(tuple(tokens), bytes(range(100, 100 + len(tokens))), confidences, tuple(parents))


def path_of(draft: Draft, node: int) -> Path:
    return () if node < 0 else (*path_of(draft, draft.parent(node)), draft.tokens[node])


def paths(draft: Draft) -> set[Path]:
    return {path_of(draft, node) for node in range(len(draft))}


def own_of(draft: Draft, text: Path, size: int) -> list[int]:
    """Own tokens of a verifier that says ``text``, and 9 elsewhere, where the first ``size`` nodes are scored."""
    at = {path_of(draft, node): node for node in range(-1, size)}
    return [said_behind(text, path) for path, _ in sorted(at.items(), key=lambda pair: pair[1])]


def said_behind(text: Path, path: Path) -> int:
    return text[len(path)] if text[: len(path)] == path and len(path) < len(text) else 9


@given(trees(), st.lists(st.integers(0, 3), max_size=8), st.integers(0, 10))
def test_a_walk_goes_as_far_as_both_agree(draft: Draft, text: list[int], size: int) -> None:
    """Guards acceptance: what is new is the verifier's own text, one token after the last node that was scored and right."""
    size = min(size, len(draft))
    new, path = draft.walk(own_of(draft, tuple(text), size))
    right = 0
    while right < len(text) and tuple(text[: right + 1]) in paths(draft.first(size)):
        right += 1
    assert new == [*text, 9][: right + 1]
    assert [draft.tokens[node] for node in path] == new[: len(path)]
    assert len(path) == right + (tuple(new) in paths(draft))


@given(trees(), st.integers(-1, 9))
def test_below_is_what_goes_on_from_there(draft: Draft, node: int) -> None:
    """Guards what is kept after an accepted guess: all that was guessed after it, and nothing beside it."""
    node = min(node, len(draft) - 1)
    begin = path_of(draft, node)
    assert paths(draft.below(node)) == {p[len(begin) :] for p in paths(draft) if p[: len(begin)] == begin} - {()}
    origins = {path_of(draft, i): draft.origins[i] for i in range(len(draft))}
    rest = draft.below(node)
    assert all(rest.origins[i] == origins[begin + path_of(rest, i)] for i in range(len(rest)))


@given(trees(), trees())
def test_a_union_has_what_either_has_once(first: Draft, other: Draft) -> None:
    """Guards against twins, which would be scored twice, and against a first guess that a second one takes the place of."""
    both, places = first.union(other)
    assert [path_of(both, place) for place in places] == [path_of(other, node) for node in range(len(other))]
    assert paths(both) == paths(first) | paths(other)
    assert len(both) == len(paths(both))
    assert (both.tokens[: len(first)], both.origins[: len(first)]) == (first.tokens, first.origins) or not first


@given(trees(), st.integers(0, 11), st.lists(st.integers(0, 3), max_size=8))
def test_first_nodes_and_found_paths(draft: Draft, size: int, tokens: list[int]) -> None:
    """Guards a draft that is cut to fit: nodes without their parent would be guesses for another text."""
    assert paths(draft.first(size)) == {path_of(draft, node) for node in range(min(size, len(draft)))}
    nodes = draft.find(tokens)
    assert path_of(draft, nodes[-1] if nodes else -1) == tuple(tokens[: len(nodes)])
    assert len(nodes) == len(tokens) or tuple(tokens[: len(nodes) + 1]) not in paths(draft)
