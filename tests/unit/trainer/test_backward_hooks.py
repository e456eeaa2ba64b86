"""When a backward pass begins, and when its last gradient is there."""

from __future__ import annotations

import torch

from lastwords.trainer import hooks


class Watched:
    def __init__(self) -> None:
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.seen: list[str] = []
        parameters = [*self.first.parameters(), *self.second.parameters()]
        for number, parameter in enumerate(parameters):
            parameter.register_hook(lambda _, n=number: self.seen.append(f"gradient {n}"))
        self.hooks = hooks.BackwardHooks(
            parameters, lambda: self.seen.append("begins"), lambda: self.seen.append("last")
        )

    def step(self) -> list[str]:
        """Two passes: through both layers, then through the first one only."""
        self.seen.clear()
        self.second(self.first(torch.ones(2))).sum().backward()
        self.first(torch.ones(2)).sum().backward()
        self.hooks.reset()
        return list(self.seen)


def test_the_last_gradient_of_each_pass_is_known_from_the_step_before() -> None:
    watched = Watched()
    assert [event for event in watched.step() if not event.startswith("gradient")] == ["begins", "begins"]
    events = watched.step()
    assert [event for event in events if not event.startswith("gradient")] == ["begins", "last", "begins", "last"]
    # "begins" comes beside the first gradient and "last" beside the last one, before it is accumulated.
    assert events.index("begins") == 1
    assert events.index("last") == 5
    assert events[-1] == "last"


def test_a_pass_with_fewer_gradients_than_usual_has_no_known_end() -> None:
    watched = Watched()
    watched.step()
    watched.seen.clear()
    watched.first(torch.ones(2)).sum().backward()
    assert "last" not in watched.seen
