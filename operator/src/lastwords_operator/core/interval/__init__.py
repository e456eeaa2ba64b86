"""
How long to train between two saves.

`single`: one kind of save (plain loss, Young, Daly, the exact optimum, last words). `levels`: cheap snapshots and
dearer checkpoints. `bounds`: limits, dead band and rate of change. `lastwords_operator.core.tuning` makes a plan of
them.

Words: the *interval* is the useful training time between two saves; the *period* adds what a save costs.
"""
