"""What speculation costs and gives, from a stream's own measured times. Pure: no database, clock or network.

    cost = assess(before, now, without, changed=("german",))

Tokens per second = tokens per step / seconds per step. The first comes from what was accepted
(`tokens_per_step.py`), the second from times measured at several K (`times.py`); together they tell
the K that would be best now (`best_k.py`) and, for each load, how many times as fast as none speculation is,
hence whether it pays (`payoff.py`). What was lost against the time before a change is compared
directly (`times.py`).
"""

from driftguard.cost.assessment import assess
from driftguard.cost.payoff import Payoff, Speculation, payoff
from driftguard.cost.times import TimedRequest
from driftguard.records.documents.cost import Choice, Cost, Interval, LoadSpeedup, SeenK, Speed, StepTime

__all__ = [
    "Choice",
    "Cost",
    "Interval",
    "LoadSpeedup",
    "Payoff",
    "SeenK",
    "Speculation",
    "Speed",
    "StepTime",
    "TimedRequest",
    "assess",
    "payoff",
]
