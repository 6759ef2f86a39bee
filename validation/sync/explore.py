"""Every reachable state, breadth first, so that the first violation found takes the fewest choices."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from validation.sync.machine import Action, Machine, State, Violation
from validation.sync.reduction import alone
from validation.sync.system import System


@dataclass(frozen=True)
class Explored:
    """What exploration found. `complete`: every interleaving is covered; `actions`: the way to the violation."""

    states: int
    transitions: int
    complete: bool
    violation: Violation | None = None
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True)
class _Reached:
    state: State
    violation: Violation | None
    forced: tuple[Action, ...]


class Explorer:
    """Explores one system; with `reduce`, orders that cannot make a difference are left out."""

    def __init__(self, system: System, *, reduce: bool = True, most_states: int = 2_000_000) -> None:
        self.machine = Machine(system)
        self.reduce = reduce
        self.most_states = most_states
        self.transitions = 0

    def exhaust(self) -> Explored:
        """Visit every state, or stop at the first violation or at the limit."""
        first = self._settle(self.machine.start())
        parents: dict[State, tuple[State, Action] | None] = {first.state: None}
        if first.violation:
            return self._found(parents, first.state, first.forced, first.violation)
        queue = deque([first.state])
        while queue:
            state = queue.popleft()
            choices = list(self.machine.actions(state))
            if not choices and (violation := self.machine.ended(state)):
                return self._found(parents, state, (), violation)
            for action in choices:
                after = self._take(state, action)
                if after.violation:
                    return self._found(parents, state, (action, *after.forced), after.violation)
                if after.state not in parents:
                    parents[after.state] = (state, action)
                    queue.append(after.state)
            if len(parents) > self.most_states:
                return Explored(len(parents), self.transitions, complete=False)
        return Explored(len(parents), self.transitions, complete=True)

    def walk(self, seed: int, steps: int) -> Explored:
        """One random interleaving to its end, at most `steps` choices. Agents differ in speed, up to a hundredfold."""
        draw = random.Random(seed)
        speed = [10 ** draw.uniform(-2, 0) for _ in self.machine.agents]
        reached = self._settle(self.machine.start())
        taken = list(reached.forced)
        for count in range(steps):
            choices = [] if reached.violation else list(self.machine.actions(reached.state))
            if not choices:
                violation = reached.violation or self.machine.ended(reached.state)
                return Explored(count, self.transitions, False, violation, tuple(taken) if violation else ())
            [action] = draw.choices(choices, [speed[choice.agent] for choice in choices])
            reached = self._take(reached.state, action)
            taken += [action, *reached.forced]
        return Explored(steps, self.transitions, complete=False)

    def _take(self, state: State, action: Action) -> _Reached:
        self.transitions += 1
        after, violation = self.machine.apply(state, action)
        return _Reached(after, violation, ()) if violation else self._settle(after)

    def _settle(self, state: State) -> _Reached:
        """Take actions that may be taken alone, as long as there are any."""
        forced: list[Action] = []
        while self.reduce and (action := alone(self.machine, state)) is not None:
            self.transitions += 1
            state, violation = self.machine.apply(state, action)
            forced.append(action)
            if violation:
                return _Reached(state, violation, tuple(forced))
        return _Reached(state, None, tuple(forced))

    def _found(
        self,
        parents: dict[State, tuple[State, Action] | None],
        state: State,
        last: tuple[Action, ...],
        violation: Violation,
    ) -> Explored:
        """The violation with the actions that lead to it, those taken alone included."""
        choices: list[Action] = []
        at = state
        while (parent := parents[at]) is not None:
            at, action = parent
            choices.append(action)
        reached = self._settle(self.machine.start())
        taken = list(reached.forced)
        for action in reversed(choices):
            reached = self._take(reached.state, action)
            taken += [action, *reached.forced]
        initial = at == state and reached.violation is not None
        return Explored(len(parents), self.transitions, False, violation, tuple(taken if initial else [*taken, *last]))
