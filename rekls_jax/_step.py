"""One step over a flat list of parameters: their matrices accumulate, are decomposed, and applied.

Matrices of equal shape that lie alike go through it together, as one stack.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rekls_jax import _collectives, _eigh_split, _matrix_step, _owners, _stacks, _turns
from rekls_jax._layout import AxisNames, Layout, Side, Sides, axis_names
from rekls_jax._matrix_step import Rule
from rekls_jax._stacks import Leaf, Stack
from rekls_jax._types import Accumulated, Bases, Hyperparameters, MatrixState, Numerics


def initial_state(
    param: jax.Array | jax.ShapeDtypeStruct,
    layout: Layout,
    numerics: Numerics,
    dtype: jax.typing.DTypeLike,
    mu_dtype: jax.typing.DTypeLike,
) -> MatrixState:
    """State before the first step of a device's part `param`. No two fields share a buffer: they may be donated."""
    eigenvalue = numerics.initial_eigenvalue or 0.0  # with None, 0 stands for "not seen yet": see `_kl`
    stack, sides = tuple(param.shape[axis] for axis in layout.view.batch), layout.sides
    on_stack = functools.partial(_collectives.varying, names=sides.batch)
    on_matrix = functools.partial(_collectives.varying, names=sides.batch + sides.axes())

    def factor(side: Side | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A factor of zeros, its eigenvectors and eigenvalues: own rows, the whole is never made."""
        if side is None:  # one by one stands for the identity of any size
            L, Q_L, eig_L = (on_stack(jnp.ones(stack + ones, dtype)) for ones in ((1, 1), (1, 1), (1,)))
            return L, Q_L, eig_L
        index = jnp.arange(side.size())
        rows = _collectives.Part(side).own(index)[:, None] == index[None, :]
        Q = on_stack(jnp.broadcast_to(rows, stack + rows.shape)).astype(dtype)
        return jnp.zeros_like(Q), Q, on_stack(jnp.full((*stack, side.size()), eigenvalue, dtype))

    (L, Q_L, eig_L), (R, Q_R, eig_R) = factor(sides.left), factor(sides.right)
    return MatrixState(
        mu=on_matrix(jnp.zeros_like(param, dtype=mu_dtype)),
        nu=on_matrix(jnp.zeros_like(param, dtype=dtype)),
        L=L,
        R=R,
        Q_L=Q_L,
        Q_R=Q_R,
        eig_L=eig_L,
        eig_R=eig_R,
        eigh_failures=on_stack(jnp.zeros(stack, jnp.int32)),
    )


def step(leaves: Sequence[Leaf], rule: Rule, count: jax.Array, every: int, eigh_axes: AxisNames) -> list[Leaf]:
    """The updates and the states after step number `count` = 1, 2, …

    Each device computes its own part of everything, and its share of the decompositions, divided over `eigh_axes`. Each
    matrix gets new bases once in `every` steps.
    """
    turns: Sequence[np.ndarray | None] = [None] * len(leaves)
    if every > 1:
        turns = _turns.deal(list(map(_as_turns, leaves)), every)
    alike: dict[tuple[Sides, jnp.dtype], list[int]] = {}
    for i, leaf in enumerate(leaves):
        alike.setdefault((leaf.layout.sides, leaf.G.dtype), []).append(i)
    stacks = [_stacks.stack([leaves[i] for i in indices], [turns[i] for i in indices]) for indices in alike.values()]
    axis_sizes = {name: _collectives.axis_size((name,)) for stack in stacks for name in stack.sides.axes()}
    plans = _owners.plan([(stack.sides, len(stack.G)) for stack in stacks], axis_sizes, eigh_axes)
    shares = [_owners.hand_out(*each) for each in zip(stacks, plans, strict=True)]
    moved = iter(_move(list(itertools.chain(*shares)), rule, count, every, eigh_axes))
    results: dict[int, Leaf] = {}
    for indices, stack, share, plan in zip(alike.values(), stacks, shares, plans, strict=True):
        whole = _owners.take_back(stack, list(itertools.islice(moved, len(share))), plan)
        results.update(zip(indices, _stacks.unstack(whole, [leaves[i] for i in indices], count), strict=True))
    return [results[i] for i in range(len(leaves))]


def _as_turns(leaf: Leaf) -> _turns.Stack:
    shape = leaf.state.eigh_failures.shape
    names = axis_names(leaf.layout.specs.eigh_failures, len(shape))
    sides = (leaf.layout.sides.left, leaf.layout.sides.right)
    cost = sum(side.size() ** 3 for side in sides if side is not None)
    return _turns.Stack(list(zip(map(_collectives.axis_size, names), shape, strict=True)), cost)


def _due(stack: Stack, turn: jax.Array) -> jax.Array | None:
    """Indices of those that get new bases, k for none; None: all."""
    if stack.turns is None:
        return None
    return _turns.due(_own_turns(stack.turns, stack.sides), turn, _turns.most_due(stack.turns))


def _own_turns(turns: np.ndarray, sides: Sides) -> jax.Array:
    return _collectives.own(jnp.asarray(turns), sides.batch)[0]


def _move(stacks: Sequence[Stack], rule: Rule, count: jax.Array, every: int, eigh_axes: AxisNames) -> list[Stack]:
    accumulated = [_each(_matrix_step.accumulate, stack, rule, count)(stack.G, stack.state) for stack in stacks]
    due = [_due(stack, (count - 1) % every) for stack in stacks]
    refreshed = _refresh(stacks, accumulated, due, rule, count, count <= every, eigh_axes)
    moved = []
    for stack, (whole, _), bases in zip(stacks, accumulated, refreshed, strict=True):
        update, state = _each(_matrix_step.apply, stack, rule, count)(stack.G, whole, bases, stack.state)
        moved.append(stack._replace(G=update, state=state))
    return moved


def _refresh(
    stacks: Sequence[Stack],
    accumulated: Sequence[tuple[Accumulated, Bases]],
    due: Sequence[jax.Array | None],
    rule: Rule,
    count: jax.Array,
    first: jax.Array,
    eigh_axes: AxisNames,
) -> list[Bases]:
    """The bases of each stack, new for those matrices that are due."""
    picked = [_pick((whole.L, whole.R, bases), which) for (whole, bases), which in zip(accumulated, due, strict=True)]
    factors = {
        (i, side): _eigh_split.Stack(S, previous, None if which is None else which < len(stack.G), stack.sides.batch)
        for i, (stack, which, (*both, bases)) in enumerate(zip(stacks, due, picked, strict=True))
        for side, (S, previous) in enumerate(zip(both, bases[:2], strict=True))
        if S is not None
    }
    eigens = dict(
        zip(factors, _eigh_split.decompose(list(factors.values()), rule.eigenbasis, first, eigh_axes), strict=True)
    )
    refreshed = []
    for i, (stack, which, (*_, old), (_, bases)) in enumerate(zip(stacks, due, picked, accumulated, strict=True)):
        new = _each(_matrix_step.refresh, stack, rule, count)((eigens.get((i, 0)), eigens.get((i, 1))), old)
        refreshed.append(_put(bases, new, which))
    return refreshed


# Never an index out of bounds, though JAX defines what is read and written there: where `x` is a slice of something larger,
# XLA (jax 0.10.2, on a CPU) reads and writes beyond the slice.
def _pick(tree: Any, due: jax.Array | None) -> Any:
    return tree if due is None else jax.tree.map(lambda x: x[jnp.minimum(due, len(x) - 1)], tree)


def _put(tree: Any, picked: Any, due: jax.Array | None) -> Any:
    def each(x: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.concatenate([x, x[:1]]).at[due].set(new)[:-1]  # the last place takes what is not due

    return picked if due is None else jax.tree.map(each, tree, picked)


def _each(phase: Callable[..., Any], stack: Stack, rule: Rule, count: jax.Array) -> Callable[..., Any]:
    """`phase` of `_matrix_step`, of each matrix of the stack."""
    dtype = stack.G.dtype
    division = _collectives.division(stack.sides)
    rule = rule._replace(hyper=_as_dtype(rule.hyper, dtype))
    run = jax.vmap(functools.partial(phase, rule=rule, t=count.astype(dtype), division=division))
    if stack.turns is None or stack.turns.min() >= 0:
        return run

    def rest(*arguments: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *arguments))
        return jax.tree.map(functools.partial(_collectives.varying, names=stack.sides.batch), zeros)

    # A device that owns none of these may have others to work on.
    busy = jnp.any(_own_turns(stack.turns, stack.sides) >= 0)
    return lambda *arguments: jax.lax.cond(busy, run, rest, *arguments)


def _as_dtype(hyper: Hyperparameters, dtype: jnp.dtype) -> Hyperparameters:
    """Python numbers stay as they are, exact and weakly typed; arrays must not widen the state (x64) or narrow it."""
    return Hyperparameters(*(float(x) if isinstance(x, (int, float)) else jnp.asarray(x, dtype) for x in hyper))
