"""Training many small models in one pass, with checkpoints that resume exactly.

The models of a stack have one shape; each has its own optimiser. `train_stacked` takes any loss,
`train` tiny transformers on sequences that all models of the stack see. All random numbers of step
t come from the seed and from t, so that a run continued from a checkpoint is the run that was never
stopped, to the last bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from .sequences import TokenSource
from .tiny_transformer import (
    Parameters,
    TransformerShape,
    initial_parameters,
    next_token_losses,
)

ADAM_EPS = 1e-8
OPTIMISERS = ("sgd", "adamw")


@dataclass(frozen=True)
class Optimiser:
    """How one model is trained.

    `kind` "sgd": step `-lr m` with `m <- momentum m + g`; "adamw": step
    `-lr m_hat / (sqrt(v_hat) + 1e-8)`, `betas` for the two averages. Both then shrink matrices, not
    biases, by `lr weight_decay`. `edit_step(parameters, step)` returns the step to take instead;
    `edit_parameters(parameters)` is called every `edit_every` steps and returns new parameters:
    what it replaces loses its averages. Raises ValueError for an unknown kind.

    >>> Optimiser("adamw", 1e-3, weight_decay=0.1).betas
    (0.9, 0.99)
    """

    kind: str
    learning_rate: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    edit_step: Callable[[Parameters, Parameters], Parameters] | None = None
    edit_parameters: Callable[[Parameters], Parameters] | None = None
    edit_every: int = 0

    def __post_init__(self):
        if self.kind not in OPTIMISERS:
            raise ValueError(f"kind={self.kind!r}: expected one of {OPTIMISERS}")


class _Rates:
    """How learning rates change with the step."""

    def rate(self, step: int) -> float:
        """The factor of the learning rates at a step, 0, 1, ..., steps - 1."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        progress = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Schedule(_Rates):
    """How a stack of models is trained, one optimiser for each; the fields of `TrainingConfig`."""

    optimisers: tuple[Optimiser, ...]
    steps: int
    warmup: int = 0
    final_rate: float = 1.0
    clip: float = math.inf


@dataclass(frozen=True)
class TrainingConfig(_Rates):
    """One run: a stack of transformers, one for each optimiser, that start from the same point.

    The learning rates rise linearly over `warmup` steps and then follow a cosine down to
    `final_rate` of their peak at `steps` (1: constant). `clip`: largest norm of a model's gradient.
    """

    shape: TransformerShape
    optimisers: tuple[Optimiser, ...]
    steps: int
    batch_size: int
    seed: int = 0
    initial_scale: float = 0.02
    warmup: int = 0
    final_rate: float = 1.0
    clip: float = math.inf
    dropout: float = 0.0


class TrainingStep(NamedTuple):
    """What a hook sees: the step number, parameters before, the optimisers' steps, raw gradients.

    `after` are the new parameters, those that `edit_parameters` replaced included.
    """

    index: int
    before: Parameters
    change: Parameters
    after: Parameters
    gradients: Parameters


@dataclass
class TrainingRun:
    """A run as far as it went: `losses (step, S)`, and each record `(len(observed), S, ...)`."""

    config: Schedule | TrainingConfig
    parameters: Parameters
    step: int = 0
    losses: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    observed: list[int] = field(default_factory=list)
    records: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.step == self.config.steps


Observer = Callable[[TrainingStep], Mapping[str, torch.Tensor]]
Losses = Callable[[Parameters, int], torch.Tensor | tuple[torch.Tensor, Parameters]]


def train(
    config: TrainingConfig,
    source: TokenSource,
    observe: Observer | None = None,
    *,
    every: int = 1,
    max_steps: int | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 100,
    device: torch.device | str = "cpu",
) -> TrainingRun:
    """Train the models of `config` on sequences of length L + 1 from `source`.

    `observe(step)` is called every `every` steps; what it returns, tensors with a leading model
    axis, is stacked in the records. With a `checkpoint` the run starts from that file if it exists,
    and saves itself there every `checkpoint_every` steps and at the end of the call; `max_steps`
    ends the call early. Raises ValueError for a vocabulary larger than the shape's, for a
    checkpoint of another configuration, and when a loss is not finite.

    >>> from mhabook_lib.sequences import InductionTask
    >>> shape = TransformerShape(16, 7, 4, 2, num_layers=1)
    >>> config = TrainingConfig(shape, (Optimiser("sgd", 0.1),) * 2, steps=3, batch_size=4)
    >>> train(config, InductionTask()).losses.shape
    torch.Size([3, 2])
    """
    if source.vocab_size > config.shape.vocab_size:
        raise ValueError(
            f"vocab_size={config.shape.vocab_size}: expected at least {source.vocab_size}, "
            f"for {source.name}"
        )

    def losses(parameters: Parameters, t: int) -> torch.Tensor:
        rng = np.random.default_rng([config.seed, t])
        tokens = source.batch(config.batch_size, config.shape.seq_len + 1, rng)
        noise = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
        tokens = torch.from_numpy(tokens).to(device)
        return next_token_losses(config.shape, parameters, tokens, config.dropout, noise)

    rng = np.random.default_rng(config.seed)
    initial = initial_parameters(config.shape, rng, config.initial_scale, len(config.optimisers))
    return train_stacked(
        losses,
        {name: value.to(device) for name, value in initial.items()},
        config,
        observe,
        every=every,
        max_steps=max_steps,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        words={"source": source.name},
    )


def train_stacked(
    losses: Losses,
    parameters: Parameters,
    config: Schedule | TrainingConfig,
    observe: Observer | None = None,
    *,
    every: int = 1,
    max_steps: int | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 100,
    words: Mapping[str, str] | None = None,
) -> TrainingRun:
    """Train a stack of S models from `parameters`, tensors (S, ...), on any losses.

    `losses(parameters, step)` returns the S losses of a step, model i's a function of entries i
    only: then one gradient of their sum serves all. It may return the pair (losses, gradients).
    Hooks and checkpoints as in `train`; `words` name what the checkpoint must agree in besides the
    configuration. Raises ValueError for a leading axis other than the number of optimisers, and as
    `train`.

    >>> start = {"w": torch.tensor([[3.0], [3.0]], dtype=torch.float64)}
    >>> config = Schedule((Optimiser("sgd", 0.1), Optimiser("sgd", 0.5)), steps=2)
    >>> run = train_stacked(lambda p, t: p["w"].square().sum(1) / 2, start, config)
    >>> run.parameters["w"].flatten().round(decimals=6).tolist()
    [2.43, 0.75]
    """
    for name, value in parameters.items():
        if len(value) != len(config.optimisers):
            raise ValueError(
                f"{name} of shape {tuple(value.shape)}: expected a leading axis of "
                f"{len(config.optimisers)}, one entry for each optimiser"
            )
    run, averages = _start(config, parameters, dict(words or {}), checkpoint)
    last = min(config.steps, run.step + (config.steps if max_steps is None else max_steps))
    gathered, records = [], []
    while run.step < last:
        loss, step = _one_step(config, losses, run, averages)
        gathered.append(loss)
        if observe is not None and step.index % every == 0:
            run.observed.append(step.index)
            records.append({name: v.detach().cpu() for name, v in observe(step).items()})
        run.parameters, run.step = step.after, step.index + 1
        if run.step == last or run.step % checkpoint_every == 0:
            _collect(run, gathered, records)
            if checkpoint is not None:
                _save(checkpoint, run, averages, dict(words or {}))
    return run


def _one_step(config, losses, run, averages) -> tuple[torch.Tensor, TrainingStep]:
    """Gradients, the optimisers' steps, and what the optimisers edit."""
    before, t = run.parameters, run.step
    loss, gradients = _with_gradients(losses, before, t)
    if not bool(torch.isfinite(loss).all()):
        raise ValueError(
            f"losses {loss.tolist()} at step {t}: expected finite losses; lower the learning rate"
        )
    rates = loss.new_tensor([o.learning_rate for o in config.optimisers]) * config.rate(t)
    change = averages.step(before, _clipped(gradients, config.clip), rates)
    for i, optimiser in enumerate(config.optimisers):
        if optimiser.edit_step is not None:
            own = (_model(before, i), _model(change, i))
            for name, value in optimiser.edit_step(*own).items():
                change[name][i] = value
    after = {name: value + change[name] for name, value in before.items()}
    _edit_parameters(config, after, averages, t + 1)
    return loss.cpu(), TrainingStep(t, before, change, after, gradients)


def _with_gradients(losses, parameters, t) -> tuple[torch.Tensor, Parameters]:
    """Losses that know their gradients return both; the others are differentiated."""
    leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    found = losses(leaves, t)
    if isinstance(found, tuple):
        return found
    gradients = torch.autograd.grad(found.sum(), list(leaves.values()))
    return found.detach(), dict(zip(leaves, gradients, strict=True))


def _clipped(gradients: Parameters, clip: float) -> Parameters:
    """Gradients scaled down, model by model, to a norm of at most `clip`."""
    square = sum(g.flatten(1).square().sum(1) for g in gradients.values())
    factor = (clip / square.sqrt()).clamp(max=1.0)
    return {name: g * _over(factor, g) for name, g in gradients.items()}


def _edit_parameters(config, after, averages, count) -> None:
    """What single optimisers ask for after so many steps, in place."""
    for i, optimiser in enumerate(config.optimisers):
        if optimiser.edit_every and count % optimiser.edit_every == 0:
            now = _model(after, i)
            for name, value in optimiser.edit_parameters(now).items():
                if value is not now[name]:
                    after[name][i] = value
                    averages.forget(name, i)


def _model(stack: Parameters, i: int) -> Parameters:
    return {name: value[i] for name, value in stack.items()}


class _Averages:
    """First and second moments of the gradients of a stack, and their age."""

    def __init__(self, optimisers, parameters: Parameters):
        self.optimisers = optimisers
        self.first = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.second = {name: torch.zeros_like(value) for name, value in parameters.items()}
        models, like = len(optimisers), next(iter(parameters.values()))
        self.age = {name: like.new_zeros(models) for name in parameters}
        adam = [o.kind == "adamw" for o in optimisers]
        keep = [o.betas[0] if a else o.momentum for o, a in zip(optimisers, adam, strict=True)]
        self.adam = torch.tensor(adam, device=like.device)
        self.keep_first = like.new_tensor(keep)
        self.keep_second = like.new_tensor([o.betas[1] for o in optimisers])
        self.decay = like.new_tensor([o.weight_decay for o in optimisers])

    def step(self, parameters: Parameters, gradients: Parameters, rates) -> Parameters:
        """The change of all parameters; updates the averages."""
        return {
            name: self._change(name, parameters[name], g, rates) for name, g in gradients.items()
        }

    def _change(self, name, value, g, rates) -> torch.Tensor:
        self.age[name] = self.age[name] + 1
        share = torch.where(self.adam, 1 - self.keep_first, 1.0)
        first = _over(self.keep_first, g) * self.first[name] + _over(share, g) * g
        keep = _over(self.keep_second, g)
        second = keep * self.second[name] + (1 - keep) * g.square()
        self.first[name], self.second[name] = first, second
        first_hat = first / _over(1 - self.keep_first ** self.age[name], g)
        second_hat = second / _over(1 - self.keep_second ** self.age[name], g)
        adam = first_hat / (second_hat.sqrt() + ADAM_EPS)
        direction = torch.where(_over(self.adam, g), adam, first)
        if not name.startswith("b_"):
            direction = direction + _over(self.decay, g) * value
        return -_over(rates, g) * direction

    def forget(self, name: str, model: int) -> None:
        """Start the averages of one parameter of one model anew."""
        for moments in (self.first, self.second, self.age):
            moments[name][model] = 0


def _over(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(S,) -> (S, 1, ..., 1), to multiply `like` (S, ...)."""
    return vector.reshape(-1, *[1] * (like.ndim - 1))


# Checkpoints


def _collect(run: TrainingRun, losses: list, records: list) -> None:
    """Move what was gathered in lists into the run's tensors."""
    run.losses = torch.cat([run.losses.reshape(-1, len(losses[0])), torch.stack(losses)])
    for name in records[0] if records else ():
        stacked = torch.stack([record[name] for record in records])
        old = run.records.get(name)
        run.records[name] = stacked if old is None else torch.cat([old, stacked])
    losses.clear()
    records.clear()


def _description(config, words: dict[str, str]) -> dict[str, str]:
    """The configuration as words; a function is named by its qualified name."""
    described = {name: str(value) for name, value in asdict(config).items() if name != "optimisers"}
    for i, optimiser in enumerate(config.optimisers):
        for name, value in asdict(optimiser).items():
            described[f"optimisers[{i}].{name}"] = getattr(value, "__qualname__", str(value))
    return described | words


def _save(path: Path, run: TrainingRun, averages: _Averages, words: dict[str, str]) -> None:
    state = {
        "config": _description(run.config, words),
        "run": {name: getattr(run, name) for name in _STORED},
        "averages": {name: getattr(averages, name) for name in ("first", "second", "age")},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


_STORED = ("parameters", "step", "losses", "observed", "records")


def _start(config, parameters, words, checkpoint) -> tuple[TrainingRun, _Averages]:
    """A new run, or the one that the checkpoint holds."""
    run = TrainingRun(config, dict(parameters))
    averages = _Averages(config.optimisers, run.parameters)
    if checkpoint is not None and checkpoint.is_file():
        device = next(iter(parameters.values())).device
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        wanted, found = _description(config, words), state["config"]
        for name in sorted(set(wanted) | set(found)):
            if wanted.get(name) != found.get(name):
                raise ValueError(
                    f"checkpoint {checkpoint} has {name}={found.get(name)}: expected "
                    f"{wanted.get(name)}; remove the file or name another"
                )
        for owner, part in ((run, "run"), (averages, "averages")):
            for name, value in state[part].items():
                setattr(owner, name, value)
    return run, averages
