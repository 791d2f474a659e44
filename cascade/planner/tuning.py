"""The planner's tuned numbers: which tiers draft, how guesses are judged, what passes score. None changes a text."""

# Chains: which tiers below draft (`cascade.planner.chains`, `cascade.tier.drafting`)

EXPLORATION_SHARE = 0.01  # the share of a tier's time that exploration may cost
FEW_SESSIONS = 2  # with more, a trial slows all of them, and draft tiers on the same processors rarely pay
EXPLORATION_PASSES = 12.0  # what one exploration may cost, in passes, besides the prefill of the tiers below
LOSS_MEMORY_S = 3600.0  # the tier's seconds in which a chain that lost is not explored at higher loads
RATE_MEMORY = 0.99  # a chain's rate loses this factor of weight per pass: loads change within some hundred passes
RATE_DOUBT = 1.3  # relative error of a rate known from one pass; from ``n`` passes it is RATE_DOUBT / sqrt(n)
BETTER = 1.03  # a chain replaces the best one if its rate is higher by this factor: less is noise
MIN_PASSES = 12  # passes before a chain is judged, for any number of sessions: drafters read all prompts at first
FEW_PASSES = 4  # passes after which an exploration may end as clearly worse
MAX_PASSES = 48  # passes after which an unclear exploration ends
SCOUTS = 8  # one session in this many drafts with tiers on processors of their own even while others do not
SETTLING_PASSES = 8  # passes that a new drafter has for its first guesses, before their absence counts against it
MAX_READING_SHARE = 0.75  # the share of the time between two tokens that may count as reading, which is an estimate

# Acceptance: chances of guesses (`cascade.planner.acceptance`)

VERDICT_MEMORY = 0.97  # weight of old verdicts after a new one: a change of domain shows within some twenty verdicts
PRIOR_WEIGHT = 6.0  # the weight of each kind's prior, in verdicts
WARMEST = 2.0  # higher temperatures share the statistics of this one
PRIOR_BY_RANK = (0.75, 0.1, 0.03, 0.02, 0.01)  # chances where the gap is unknown
PRIOR_WRONG = 0.62  # an own token of gap ``g`` is wrong with chance PRIOR_WRONG * exp(-PRIOR_FADE * g), as on trained models
PRIOR_FADE = 0.95
PRIOR_RUNNER_UPS = (0.5, 0.15, 0.07, 0.05)  # the share of these cases in which each runner-up is right
ARRIVALS_WEIGHT = 0.3  # the latest pass's weight in the mean of guesses that arrive during a pass
MIN_KEPT_SHARE = 0.02  # a tier runs ahead only so far that the text is kept with this chance
MIN_RUN_AHEAD = 2  # tokens that a tier runs ahead of the tier above at least

# Passes: what they cost and score (`cascade.planner.cost`, `cascade.planner.choice`, `cascade.tier.scheduler`)

GUESS_PRICE = 1.15  # factor on the price of guesses, since the best-looking ones are the most overestimated
USELESS_PASSES = 16  # after this many passes without a scored guess, a session's drafters inside the tier guess seldom
SELDOM = 4  # they then guess before one pass in this many: guessing takes a few microseconds of a pass
LIKELY = 0.5  # a guess with this chance or more makes a wait for others needless
MIN_RUNNER_UP_CHANCE = 0.02  # a runner-up with less chance of being right is not offered
MIN_BRANCH_CHANCE = 0.05  # a pass may start for a branch alone if the branch is of use with this chance
PREFILL_TOKENS = 32  # a session with this many tokens to read counts as prefilling
COST_WEIGHT = 0.05  # the latest pass's weight in the points beside its size, and in points without recent passes
COST_MEMORY = 0.98  # how much a point counts as recently timed fades by this factor per pass of another size
STALE = 0.1  # a point counts as stale below this: after some 110 passes of other sizes
SURPRISE = -0.1  # a pass that differs by less from its expected time, as a share of that, may be noise
STALE_WEIGHT = 0.3  # the weight of such a pass
TRIED_SHARE = 8  # to time a stale size, a pass scores one guess more for this many texts than pays, or twice as many as pay
MEAN_WEIGHT = 0.1  # the latest pass's weight in means
OUTLIER = 2.0  # a pass counts as at most this many times too slow or too fast, since machines pause
