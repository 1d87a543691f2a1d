"""`CallReader`: decides whether a call is answered for its own data or for those of training (see `mode`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pyro
import torch
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_nami.guide.arguments import Cache, is_array
from pyro_nami.guide.call import Call, Reading, TrainedAnswer, sites_of, target_of
from pyro_nami.guide.memory import Memory
from pyro_nami.guide.mode import Change, Data, Mode
from pyro_nami.guide.options import Options
from pyro_nami.guide.own_data import OwnData
from pyro_nami.guide.plan import Plan
from pyro_nami.guide.rules import fixed_size
from pyro_nami.messages import quoted, warn
from pyro_nami.parameters.backward import Backward
from pyro_nami.parameters.conditioning import covariates_of
from pyro_nami.program.isolation import untouched
from pyro_nami.program.program import Program
from pyro_nami.program.runner import signature_of
from pyro_nami.program.surroundings import PLAIN, Surroundings
from pyro_nami.program.vectorized import Vectorized, unmapped

__all__ = ["ARGUMENTS", "CallReader", "has_first_sizes"]

# the node of all of them, where data are made of parameters
ARGUMENTS = ("arguments of the model",)
MASKS = ("masks among the arguments",)
_FAILS = (
    "The model fails at the arguments of this call ({}: {}). The guide draws all latents as in training, at the sizes "
    "of training."
)
NOT_SAVED = "A loaded guide has the data of its training only if it was saved with save_data=True"


class _Step(NamedTuple):
    """A call that is a training step if a backward pass comes back from it."""

    backward: Backward
    reading: Reading
    notice: str = ""  # what to warn of if it is none
    is_given: bool = False  # whether its data were ``observations=``


class CallReader:
    """Decides which data each call of a guide is answered for, and finds them.

    Args:
        plan: the guide's; another one may take its place.
        options: the guide's.
    """

    def __init__(self, plan: Plan, options: Options) -> None:
        self._options = options
        self.cache = Cache()
        mode = options.mode or (Mode.AMORTIZED if plan.semi_observed else Mode.FIXED)
        self.memory = Memory(mode, self.cache)
        self.follow(plan)
        self._open: list[_Step] = []  # of which this is not known yet
        self._latest_surroundings: Surroundings | None = None
        self._written: frozenset[Hashable] | None = None  # places that the model writes to
        self._told: frozenset[str] = frozenset()
        # the latest step on other data than those that the guide answers for
        self.differing: Reading | None = None
        # whether training goes on with another data set, which networks are yet to be centered on
        self.moved = False
        self._given: Data | None = None  # of the latest step by ``observations=``

    def __getstate__(self) -> dict[str, Any]:
        lost = dict.fromkeys(["differing", "_latest_surroundings", "_written"])
        return {**self.__dict__, **lost, "_open": []}

    def read(
        self,
        call: Call,
        plates: Mapping[str, pyro.plate],
        observations: Any,
        *,
        backward: Backward | None,
        draws: bool,
    ) -> Call:
        """Returns the call whose data the guide answers for. If that is another call, its ``target`` is the given one.

        Args:
            call: with model and arguments.
            plates: made outside the model.
            observations: values by site; those that are no observed sites are passed over.
            backward: tells whether a backward pass has come back from the call; None where none may.
            draws: whether latents will be drawn; unless the model is run for that, it has to be run for their plates.

        Raises:
            ValueError: where a site has no data, or is missing from the run.
        """
        memory, plan = self.memory, self.plan
        self.settle()
        given = any(observations.get(name) is not None for name in plan.read)
        trained = memory.mode is Mode.FIXED and memory.history.is_trained
        predicts = trained and not given and backward is None
        answer = self._trained_call(call.program.model) if predicts else None
        if answer is not None and not plan.plates.subsampled:
            return self._answer(answer, call)
        own = self.own.values_of(call, plates, observations, draws)
        if answer is not None and not self._reads_own_rows(answer, own):
            return self._answer(answer, call, own)
        absent = [name for name in plan.read if name not in own.values and name not in own.lacking]
        if absent:
            return self._without(absent, own, call, given)
        own = self.own.completed(own)
        if given and trained:
            return self._explicit(own)
        if given:
            if backward is not None and memory.mode is Mode.FIXED:
                reading = Reading(own, self._data_of(own))
                self._open.append(_Step(backward, reading, is_given=True))
            return self._with_kept(own)
        if trained:
            return self._compared(own, call, backward)
        return self._noted(own, call, backward)

    def settle(self) -> None:
        """Records each call as a training step whose backward pass has come.

        A loss may add up several calls, so earlier ones wait for as long as their graphs live.
        """
        steps, self._open = self._open, []
        for step in steps:
            if step.backward.has_come:
                self._take_in(step)
            elif step.backward.may_come:
                self._open.append(step)
            else:
                self._tell(step.notice)

    def count_as_training(self) -> None:
        """Records all open calls as training steps, without a backward pass."""
        for step in self._open:
            step.backward.has_come = True
        self.settle()

    def _take_in(self, step: _Step) -> None:
        """Records a call as a training step."""
        memory = self.memory
        if step.is_given:
            if self._given not in (None, step.reading.data):
                self._tell(
                    "Training steps had observations= that differ from step to step, and this guide is made for one "
                    "data set. Make it with mode='amortized', which serves the data of each call."
                )
            self._given = step.reading.data
            return
        change = memory.history.step(step.reading.data or {})
        if step.reading.data != memory.history.current:
            self.differing = step.reading
        elif change is not Change.MINIBATCHES:
            memory.keep(step.reading)
        if change is Change.MOVED:
            memory.forget_derived()
            self.moved = True
        elif change is Change.MINIBATCHES and self._options.mode is None:
            memory.mode = Mode.MINIBATCHES
        elif change is Change.MINIBATCHES:
            self._tell(
                "The data differ from step to step, and the guide is asked to be fixed: it answers for those of its "
                "first step. Use mode='minibatches', or subsample a plate of the model."
            )

    def follow(self, plan: Plan) -> None:
        """Takes another plan, and forgets what was found for the arguments of earlier calls."""
        self.plan, self.own = plan, OwnData(plan, self.cache)
        self.cache.clear()
        self.memory.forget_derived()

    @property
    def names(self) -> list[Any]:
        """The nodes whose fingerprints a saved state may hold."""
        return [*self.plan.sites, *map(covariates_of, self.plan.sites), ARGUMENTS, MASKS]

    def apply(self, fn: Callable[[Tensor], Tensor], plan: Plan) -> None:
        """Applies ``fn`` to all tensors kept, to move them to another device, where ``plan`` is."""
        self.settle()
        self.memory.apply(fn)
        self.follow(plan)

    # ---- whose data decide

    def _trained_call(self, model: Callable) -> Call | None:
        """Returns the training call; a loaded guide makes it from the saved state. None if there is none."""
        memory = self.memory
        if memory.kept is None and memory.context is not None:
            args, kwargs, indices, values = memory.context
            program = Program(model, args, kwargs, self.plan.loops, self.plan.program.computed)
            call = Call(program, indices=indices, values=values, held=values)
            memory.kept = Reading(self.own.all_of(call), memory.history.current)
        return None if memory.kept is None else memory.kept.call

    def _answer(
        self, answer: Call, call: Call, own: Call | None = None, *, is_step: bool = False
    ) -> Call:
        """Returns the training call as the answer to another call.

        With subsampled plates the answer has the instances of the other call, as ``own`` holds them. In a training step
        the warning about latents without training data waits until it is clear that no backward pass comes.

        Raises:
            ValueError: where the arguments of training do not hold the data of these instances.
        """
        answer = self._as_in_training(answer, call)
        target = self._target(answer, own or call)
        if not is_step:
            self._tell(target.notice)
        shown = self.plan.rules.keys() - target.hidden
        if own is not None and not all(map(self._is_whole, shown)):
            found = self._rows_at(answer, own)
            if found is None:
                site = next(name for name in self.plan.read if not self._is_whole(name))
                raise ValueError(
                    f"Expected data for the observed site '{site}' at the instances of "
                    f"{quoted(sorted(self.plan.plates.subsampled))} that this call has; the arguments of training do "
                    f"not hold them. Pass the data as the model takes them, or as observations={{'{site}': value}}; or "
                    "subsample as many instances as in training."
                )
            answer = found
        elif answer.moving:
            held = {name: value for name, value in answer.held.items() if name not in answer.moving}
            answer = self.own.all_of(answer._replace(values=held, held=held))
        return self._with_kept(answer._replace(target=target), True, self.memory.surroundings)

    def _surroundings(self, call: Call) -> Surroundings:
        """Returns the model's surroundings at a call: the latest ones, while nothing in them has changed."""
        leaves = [leaf for leaf in call.program.leaves() if not isinstance(leaf, PLAIN)]
        objects = [leaf for leaf in leaves if not is_array(leaf)]
        roots = [unmapped(call.program.model), *objects]
        kept = self._latest_surroundings
        if kept is None or not kept.are_of(roots):
            if self._written is None:
                before = Surroundings(roots)
                if before.has_data:
                    with suppress(Exception), untouched(call.program.model), torch.no_grad():
                        call.run(self.plan.initial, broadcast=True)
                self._written = before.changed()
            kept = Surroundings(roots, self._written)
        now = kept.now()
        if now is not kept and not kept.are_current():  # covariates and index maps may be others
            self.cache.clear()
        self._latest_surroundings = now
        return now

    def _as_in_training(self, answer: Call, call: Call) -> Call:
        """Returns the training call with the model of another call, run in the surroundings of training."""
        around, model = self.memory.surroundings, call.program.model
        if around is not None and around.changed():
            is_mapped = isinstance(model, Vectorized)
            model = around.around(unmapped(model))
            model = Vectorized(model, self.plan.plates.nesting) if is_mapped else model
        return answer._replace(program=answer.program._replace(model=model))

    def _is_whole(self, site: str) -> bool:
        """Whether a site is in no subsampled plate."""
        return self.plan.plates.subsampled.isdisjoint(self.plan.sites[site].plates)

    def _reads_own_rows(self, answer: Call, own: Call) -> bool:
        """Whether latents of subsampled plates are inferred from the rows of data that a call brings.

        They are if the arguments of training do not hold the data of these instances. Instances that training did not
        have do not count: they are drawn from the model's own conditional.
        """
        plan = self.plan
        if any(name not in own.values for name in plan.read):
            return False
        answer = self._as_in_training(answer, own)
        hidden = self._target(answer, own).hidden  # as training had no such instances
        shown = [name for name in plan.rules if name not in hidden]
        names = [name for name in shown if not self._is_whole(name) and plan.data_of(name)]
        if not names or self._rows_at(answer, own) is not None:
            return False
        self._tell(
            "The arguments of training do not hold the data of all instances that this call has, so "
            f"{quoted(names)} are inferred from the rows of data in this call, even where training had others. To keep "
            "to the data of training, pass all data to the model in every step, and subsample them there."
        )
        return True

    def _rows_at(self, answer: Call, own: Call) -> Call | None:
        """Returns the training call with its data at the instances of another call, by a run of the model.

        It is None where the arguments of training do not hold the data of these instances. If the other call has more
        instances, or fewer, the model is run with the tensors of training and the other call's numbers, flags and
        strings, one of which may be the size of the subsample.
        """
        parts = [name for name in self.plan.read if not self._is_whole(name)]
        if parts and not self.memory.has_one_context:
            return None
        kept = {name: value for name, value in answer.values.items() if self._is_whole(name)}
        held = {name: value for name, value in answer.held.items() if name in kept}
        call = answer._replace(indices=own.indices, values=kept, held=held)
        counts = {plate: len(index) for plate, index in own.indices.items()}
        before = {plate: len(answer.indices.get(plate, own.indices[plate])) for plate in counts}
        try:
            if before != counts:
                call = _with_plain_arguments_of(call, own)
            found = self.own.all_of(call)
        except Exception:  # noqa: BLE001  whatever a model does with arguments that do not go together
            return None
        is_complete = found.values.keys() >= set(parts)
        is_there = is_complete and not any(_other_sizes(found, self.plan, parts, counts))
        return found if is_there else None

    def _target(self, answer: Call, call: Call) -> TrainedAnswer:
        """Returns how a call differs from the one that answers it; cached while the arguments stay the same."""

        def found() -> TrainedAnswer:
            before = answer.sites or sites_of(answer, self.plan)
            try:
                now = call.sites or sites_of(call, self.plan)
            except Exception as error:  # noqa: BLE001  whatever a model does without handlers that it relies on
                return TrainedAnswer(call, notice=_FAILS.format(type(error).__name__, error))
            return target_of(call, before, now, self.plan)

        return self.cache.get("target", [*call.leaves, answer.values], found)

    def _compared(self, own: Call, call: Call, backward: Backward | None) -> Call:
        """Returns a trained guide's answer to a call with data: the call itself, if it has the training data."""
        memory = self.memory
        data, tracing = self._data_of(own), torch.jit.is_tracing()
        same = tracing or data == memory.history.current
        around = None if tracing else self._surroundings(call)
        if backward is not None and not tracing:
            self._open.append(_Step(backward, Reading(memory.frozen(own, data), data, around)))
        before = memory.surroundings
        # Of minibatches of a plate the arguments of a step hold the data, whatever else has changed.
        is_told = backward is not None and bool(self.plan.plates.subsampled)
        is_unchanged = before is None or before is around or is_told or before.are_current()
        if same and is_unchanged:
            _check_sizes(own, self.plan)
            if memory.kept is None:
                memory.keep(Reading(memory.frozen(own, data), data, around))
            return self._with_kept(own, True, around)
        varies = any(family.varies for family in self.plan.families.values())
        if backward is not None and varies and _is_step():
            # draws for other data may lie outside of supports that these move
            _check_sizes(own, self.plan)
            return self._with_kept(own)
        answer = self._trained_call(call.program.model)
        if answer is None:
            site = next(iter((*self.plan.read, *self.plan.groups)), None)
            if site is None:
                return own
            raise ValueError(
                f"Expected the data of '{site}' that the loaded guide was trained on; this call brings others. "
                f"{NOT_SAVED}: call it once with these, then with others."
            )
        answer = self._answer(answer, call, own, is_step=backward is not None)
        if backward is not None and not tracing:
            # no step could be scored given those that this call has no place for
            if answer.target.private:
                return self._with_kept(own)
            self._open[-1] = self._open[-1]._replace(notice=answer.target.notice)
        return answer

    def _noted(self, own: Call, call: Call, backward: Backward | None) -> Call:
        """Returns a call that is answered for its own data, and keeps it for later calls without data."""
        memory = self.memory
        _check_sizes(own, self.plan)
        fixed, data = memory.mode is Mode.FIXED, self._data_of(own)
        tracing = torch.jit.is_tracing()
        around = self._surroundings(call) if fixed and not tracing else None
        is_kept = backward is not None or memory.kept is None
        if fixed or memory.mode is Mode.AMORTIZED and is_kept:
            frozen = memory.frozen(own, data)
            if memory.kept is None or frozen is not memory.kept.call:
                memory.derived = memory.derived._replace(constants={})
            reading = Reading(frozen, data, around)
            memory.keep(reading)
            if fixed and backward is not None:
                if tracing:  # compiled steps do not come here again
                    memory.history.step(data)
                else:
                    self._open.append(_Step(backward, reading))
        return self._with_kept(own, memory.mode is not Mode.MINIBATCHES, around)

    def _with_kept(
        self, call: Call, constants: bool = False, around: Surroundings | None = None
    ) -> Call:
        """Returns a call with the results of earlier calls; with ``constants``, those of the same data included."""
        memory = self.memory
        is_fixed = memory.mode is Mode.FIXED and not self.plan.plates.subsampled
        known = memory.derived._replace(
            constants=memory.derived.constants if constants and not call.indices else None,
            is_fixed=is_fixed,
            surroundings=around if is_fixed else None,
        )
        return call._replace(derived=known)

    def _without(self, absent: Sequence[str], own: Call, call: Call, given: bool) -> Call:
        """Returns the answer to a call that lacks data of some sites.

        Raises:
            ValueError: where nothing else says what these data are.
        """
        memory, plan = self.memory, self.plan
        answer, mode = self._trained_call(call.program.model), memory.mode
        brings_none = not any(name in own.values for name in plan.read)
        is_answered = mode is Mode.FIXED or mode is Mode.AMORTIZED and brings_none
        if answer is not None and is_answered and not given:
            return self._answer(answer, call, own)
        moving = memory.history.moving if mode is Mode.MINIBATCHES else frozenset[Hashable]()
        held = answer.values if answer is not None and mode is not Mode.AMORTIZED else {}
        values = {name: held[name] for name in absent if name in held and name not in moving}
        absent = [name for name in absent if name not in values]
        own = own._replace(values={**own.values, **values}, held={**own.held, **values})
        if not moving.issuperset(absent):
            site = absent[0]
            raise ValueError(
                f"Expected data for the observed site '{site}'; this call brings none, and the guide has seen none. "
                "Pass the data that the guide is to answer for as the model takes them, or as "
                f"observations={{'{site}': value}}. {NOT_SAVED}: call it once with these."
            )
        own = self._with_kept(self.own.completed(own))
        if not absent:
            return own
        open_names = [name for name in plan.order if name not in own.lacking]
        unseen = [name for name in open_names if not plan.data_of(name).isdisjoint(absent)]
        self._tell(
            f"This call brings no data of {quoted(absent)}, by which the guide infers {quoted(unseen)} row by row: "
            "they are drawn from the model's own conditional given all others."
        )
        return own._replace(from_prior=(*own.from_prior, *unseen))

    def _explicit(self, own: Call) -> Call:
        """Returns a trained guide's answer to ``observations=``: derived conditionals use them, learned ones do not."""
        plan = self.plan
        unseen: Collection[str] = ()
        _check_sizes(own, plan)
        answer = self._trained_call(own.program.model)
        if answer is not None:
            target = self._target(answer, own)
            self._tell(target.notice)
            unseen = [name for name in target.fresh if name in plan.learned]
        names = [name for name in plan.learned if name not in unseen]
        if names:
            self._tell(
                f"These observations are not the data that the guide was trained on: {quoted(names)} "
                "were learned on those alone and answer as they were trained. Train the guide on these data, or on "
                "simulations by InferenceCompilation, for it to serve both."
            )
        return self._with_kept(own._replace(from_prior=(*own.from_prior, *unseen)))

    def _data_of(self, call: Call) -> Data:
        """Returns the fingerprints by which a call's data are compared with those of training.

        Minibatches of a subsampled plate are taken to be the same data. Values that move with the model's parameters,
        or latents (a residual, say), are the same if the arguments are. Boolean tensors among the arguments are masks,
        which say what of the data counts.
        """
        names = filter(self._is_whole, self.plan.sites)
        values: dict[Hashable, Tensor] = {}
        for name in names:
            if name in self.plan.read and name in call.values and name not in call.moving:
                values[name] = call.values[name]
            if name in call.covariates and name not in call.program.computed:
                values[covariates_of(name)] = call.covariates[name]
        if call.moving or call.program.computed:
            values[ARGUMENTS] = _joined(call.program.leaves())
        if masks := [leaf for leaf in call.program.leaves() if _may_be_mask(leaf)]:
            values[MASKS] = _joined(masks)
        return self.memory.data_of(values)

    def _tell(self, notice: str) -> None:
        """Warns, once for each text."""
        if notice and notice not in self._told:
            self._told |= {notice}
            warn(notice)


def _with_plain_arguments_of(call: Call, other: Call) -> Call:
    """Returns a call whose numbers, flags, strings and None among the arguments are those of another call."""
    signature = signature_of(unmapped(other.program.model))
    own = signature.bind(*call.program.args, **call.program.kwargs).arguments
    bound = signature.bind_partial(*other.program.args, **other.program.kwargs)
    for name, value in own.items():
        if not all(isinstance(leaf, PLAIN) for leaf in tree_leaves(value)):
            bound.arguments[name] = value
    program = call.program._replace(args=bound.args, kwargs=bound.kwargs)
    return call._replace(program=program)


def _joined(leaves: Sequence[Any]) -> Tensor:
    """Returns the numbers of all tensors among the arguments in one vector, which begins with a zero."""
    tensors = [torch.zeros(1), *(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))]
    return torch.cat([tensor.flatten().to("cpu", torch.float64) for tensor in tensors])


def _may_be_mask(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype is torch.bool and leaf.dim() > 0


def _is_step() -> bool:
    """Whether this is a step of `pyro.infer.SVI`, which captures parameters, so that a backward pass will follow."""
    return any(
        isinstance(handler, TraceMessenger) and handler.param_only for handler in _PYRO_STACK
    )


def _check_sizes(call: Call, plan: Plan) -> None:
    """Raises where a plate that the guide flattens has changed its size."""
    sizes = {plate: plan.plates.sizes[plate] for plate in plan.blocks}
    for plate, held in _other_sizes(call, plan, call.values.keys() & plan.read, sizes):
        if held != 1:
            raise ValueError(fixed_size(plan.blocks[plate], plate, sizes[plate], held))


def has_first_sizes(call: Call, plan: Plan) -> bool:
    """Whether all plates of latents, except subsampled ones, have the sizes of the guide's first call."""
    plates = frozenset().union(*(plan.sites[name].plates for name in plan.rules))
    sizes = {plate: plan.plates.sizes[plate] for plate in plates - plan.plates.partial}
    return not any(_other_sizes(call, plan, call.values, sizes))


def _other_sizes(
    call: Call, plan: Plan, names: Iterable[str], sizes: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yields (plate, size) for plates whose size in a call's values is not that of ``sizes``; 1 without a dim."""
    for name in names:
        site, value = plan.sites[name], call.values[name]
        for plate in site.plates & sizes.keys():
            dim = plan.plates.dims[plate] - site.event_dim
            held = value.shape[dim] if value.dim() >= -dim else 1
            if held != sizes[plate]:
                yield plate, held
