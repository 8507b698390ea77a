"""A job over several processes: work dealt out, sums, and decisions that all of them take alike.

What [`Processes`] does is the same for one process, where nothing is exchanged. Every process must make the same calls
in the same order. Knows nothing of training.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from .units import processes

Item = TypeVar("Item")
Result = TypeVar("Result")


class Processes:
    """
    Use as a context, or as it is for a single process; see [`Processes.current`].

    Args:
        index (`int`, *optional*, defaults to 0): Which one this is. The first one is the main one.
        count (`int`, *optional*, defaults to 1): How many there are.
        device (`torch.device`, *optional*): Where tensors lie that are exchanged.
    """

    def __init__(self, index: int = 0, count: int = 1, device: torch.device | None = None):
        self.index, self.count, self.device = index, count, device or torch.device("cpu")

    @classmethod
    def current(cls) -> "Processes":
        """Those that `accelerate launch` or `torchrun` started, connected; else this one alone."""
        if processes()[1] < 2:
            return cls()
        from accelerate import PartialState

        # Without a GPU it has to be told: else it takes each process for a job of its own.
        state = PartialState(cpu=not torch.cuda.is_available())
        return cls(state.process_index, state.num_processes, torch.device(state.device.type))

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.index == 0

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: Any) -> None:
        # After an error the others may wait for something that never comes; who started them ends them.
        if self.count > 1 and error[0] is None:
            self.wait()
            torch.distributed.destroy_process_group()

    def wait(self) -> None:
        """Until all are here."""
        self.sum([0.0])  # not `barrier`, which wants to be told the device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element over all processes."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def largest(self, value: int) -> int:
        """The largest of all processes' values; with `bool`, whether it holds in any."""
        return max(self.gather(int(value)))

    def gather(self, value: Any) -> list[Any]:
        """All processes' values, by index."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """In place. With two processes the sums do not depend on which one had which part."""
        if self.count == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        flat = torch.cat([part.flatten() for part in parts])
        torch.distributed.all_reduce(flat)
        for parameter, part in zip(trained, flat.split([part.numel() for part in parts]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def deal(
        self, items: Sequence[Item], compute: Callable[[Item], Result], should_stop: Callable[[], bool] = lambda: False
    ) -> list[Result] | None:
        """
        `compute` of every item, dealt out one by one, in the order of the items; `None` if it was stopped.

        Args:
            should_stop (`Callable`, *optional*): Asked before every item; one process that says so stops all.
        """
        mine: list[Any] = []
        for first in range(0, len(items), self.count):
            if self.largest(should_stop()):
                return None
            index = first + self.index
            mine.append(compute(items[index]) if index < len(items) else None)
        found = self.gather(mine)
        return [found[i % self.count][i // self.count] for i in range(len(items))]


__all__ = ["Processes"]
