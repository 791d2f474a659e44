"""What drafters are measured to be worth."""

from hypothesis import given
from hypothesis import strategies as st

from cascade.chain.plan import ALONE, BREAK, Course, Seen
from cascade.chain.planner import Measured, Planner
from cascade.chain.worth import INSIDE, Worth, worth, worths

BOTH = Course(("medium", "tiny"))
rates = st.dictionaries(
    st.builds(Course, st.sampled_from([(), ("medium",), ("tiny",), ("medium", "tiny")]), st.booleans(), st.booleans()),
    st.floats(1.0, 1000.0),
)


@given(rates, st.sampled_from(["medium", "tiny", INSIDE]))
def test_worth_compares_the_best_with_the_best_without(rates: dict[Course, float], drafter: str) -> None:
    """Guards the panel: a tier is not praised for what another one does, nor judged where nothing is known without it."""
    factor = worth(rates, drafter)
    takes_part = {course: course.drafters if drafter == INSIDE else drafter in course.tiers for course in rates}
    if len(set(takes_part.values())) < 2:
        assert factor is None
        return
    assert factor is not None
    best = max(rates, key=lambda course: rates[course])
    assert (factor >= 1) == (takes_part[best] or factor == 1)


def test_requests_that_may_use_most_count() -> None:
    """Guards against two values for one label: requests that may use only some tiers are judged apart by the planner."""
    alone, both = {ALONE: 10.0, Course(("medium",)): 30.0}, {ALONE: 10.0, BOTH: 20.0, Course(("medium",)): 15.0}
    measured = [Measured(Course(("medium",)), False, 1, alone), Measured(BOTH, False, 1, both)]
    assert worths(measured) == [Worth("medium", False, 1, 2.0), Worth("tiny", False, 1, 20.0 / 15.0)]


def test_the_planner_tells_what_it_has_tried() -> None:
    """Guards the way from passes to the metric: twice as fast with the drafter is worth 2."""
    planner, allowed = Planner(), Course(("tiny",))
    for _ in range(4 * BREAK):
        used = planner.course(allowed, 1)
        tokens = 4 if used.tiers else 2
        planner.saw(allowed, used, 1, Seen(rows=1, tokens=tokens, seconds=0.01))
    [found] = worths(planner.measured())
    assert found[:3] == ("tiny", False, 1)
    assert abs(found.factor - 2) < 0.01
