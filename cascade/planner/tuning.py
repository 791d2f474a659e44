"""The planner's tuned numbers: which tiers draft, how guesses are judged, what passes score. None changes a text."""

# Chains: which tiers below draft (`cascade.planner.chains`, `cascade.tier.drafting`)

EXPLORATION_SHARE = 0.01  # the share of a tier's time that exploration may cost: half of what "never slower" may lose
FEW_SESSIONS = 2  # with more of them a try costs all of them, and draft tiers on the same processors rarely pay
EXPLORATION_PASSES = 12.0  # what one exploration may cost, beside the prefill of the tiers below
LOSS_MEMORY_S = 3600.0  # a tier's seconds for which a chain that lost is not explored at higher loads: drafters learn
RATE_MEMORY = 0.99  # weight of a chain's rate after the next pass: loads change within some hundred passes
RATE_DOUBT = 1.3  # relative error of a rate known from one pass; from ``n`` passes it is RATE_DOUBT / sqrt(n)
BETTER = 1.03  # a chain replaces the best one if its rate is so many times as high: less is noise
MIN_PASSES = 12  # passes before a chain is judged, for any number of sessions: drafters read all prompts at first
FEW_PASSES = 4  # passes of an exploration that is clearly worse
MAX_PASSES = 48  # passes of an exploration that stays unclear
SCOUTS = 8  # one of so many sessions drafts with tiers on processors of their own while all others go alone
SETTLING_PASSES = 8  # passes that a new drafter has for its first guesses, before their absence counts against it
MAX_READING_SHARE = 0.75  # the share of the time between two tokens that may count as reading, which is an estimate

# Acceptance: chances of guesses (`cascade.planner.acceptance`)

VERDICT_MEMORY = 0.97  # weight of old verdicts after a new one: a change of domain shows within some twenty
PRIOR_WEIGHT = 6.0  # the weight of each kind's prior, in verdicts
WARMEST = 2.0  # higher temperatures share its statistics
PRIOR_BY_RANK = (0.75, 0.1, 0.03)  # chances where the gap is unknown
PRIOR_WRONG = 0.62  # an own token of gap ``g`` is wrong with chance PRIOR_WRONG * exp(-PRIOR_FADE * g), as on trained models
PRIOR_FADE = 0.95
PRIOR_RUNNER_UPS = (0.5, 0.15)  # the share of these cases in which the first and the second runner-up are right
ARRIVALS_WEIGHT = 0.3  # the latest pass's weight in the mean of guesses that arrive during a pass
MIN_KEPT_SHARE = 0.02  # a tier runs ahead as far as this share of its texts is kept
MIN_RUN_AHEAD = 2  # tokens that a tier runs ahead of the tier above at least

# Passes: what they cost and score (`cascade.planner.cost`, `cascade.planner.choice`, `cascade.tier.scheduler`)

GUESS_PRICE = 1.15  # guesses must pay this many times their price: the best-looking ones are the most overestimated
USELESS_PASSES = 16  # passes that scored no guess of a session, after which its drafters inside the tier are asked seldom
SELDOM = 4  # then they are asked before one of so many passes: asking takes a few microseconds of every pass
LIKELY = 0.5  # chance from which on a guess spares the wait for others
MIN_RUNNER_UP_CHANCE = 0.02  # a runner-up with less chance of being right is not offered
MIN_BRANCH_CHANCE = 0.05  # a pass may start for a branch alone if the branch is of use with this chance
PREFILL_TOKENS = 32  # a session that reads so many tokens in a pass is prefilling
COST_WEIGHT = 0.05  # the latest pass's weight in the points beside its size, and in points without recent passes
COST_MEMORY = 0.98  # weight of a point's own passes after a pass of another size
MEAN_WEIGHT = 0.1  # the latest pass's weight in means
OUTLIER = 2.0  # a pass counts at most so many times too slow or too fast: machines pause
