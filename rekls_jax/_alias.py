"""`rekls`: the whole optimizer, ready for a training loop."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from rekls_jax import _checks, _matrix_view, _mesh
from rekls_jax._dtype import in_state_dtype
from rekls_jax._eigenbasis import Eigh
from rekls_jax._matrix_view import DimensionNumbers
from rekls_jax._mesh import ParamSpecs
from rekls_jax._transform import EVERY_STEP, MAX_PRECOND_DIM, scale_by_rekls
from rekls_jax._types import Eigenbasis, Numerics
from rekls_jax._weight_decay import METHODS, Mask, is_zero


def rekls(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.95,
    shampoo_beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.01,
    mask: Mask = None,
    *,
    weight_decay_method: str = "decoupled",
    inner: str = "adam",
    nesterov: bool = False,
    max_update_rms: float | jax.Array = 0.0,
    factors: str = "kl",
    eigenbasis: Eigenbasis = Eigh(),
    numerics: Numerics = Numerics(),
    precondition_frequency: int | np.integer = EVERY_STEP,
    max_precond_dim: int | np.integer = MAX_PRECOND_DIM,
    dimension_numbers: DimensionNumbers = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    fallback: optax.GradientTransformation | None = None,
    param_specs: ParamSpecs = None,
    mesh: Mesh | AbstractMesh | None = None,
    eigh_axes: str | Sequence[str] | None = None,
    eigh_placement: str = "split",
) -> optax.GradientTransformationExtraArgs:
    r"""REKLS: SOAP with Kullback-Leibler factors and an eigendecomposition on every step; and its relatives.

    For each matrix G (m, n), at step t = 1, 2, …, with :math:`\beta_t = 1 - (1-\beta_s)/(1-\beta_s^t)`:

    .. math::
      L &\leftarrow \beta_t L + \tfrac{1-\beta_t}{n}\, G Q_R \mathrm{diag}(1/\lambda_R) Q_R^T G^T \\
      R &\leftarrow \beta_t R + \tfrac{1-\beta_t}{m}\, G^T Q_L \mathrm{diag}(1/\lambda_L) Q_L^T G \\
      (\lambda_L, Q_L), (\lambda_R, Q_R) &\leftarrow \mathrm{eigh}(L), \mathrm{eigh}(R) \\
      U' &= \mathrm{Adam}(Q_L^T G Q_R) ,\qquad U = Q_L U' Q_R^T

    Factors: arXiv:2509.03378. Adam in their eigenbases: SOAP, arXiv:2409.11321, which is
    `rekls(lr, factors="plain", eigenbasis=OrthogonalIteration(), precondition_frequency=10)`; with `factors="kl"` KL-SOAP.
    A 2-D leaf with at least one entry is a matrix; every other leaf goes to `fallback`. State of one matrix (see
    `ReklsState`): 2mn + 2m² + 2n² + m + n numbers, float32, or float64 for a float64 parameter. Updates have the gradient's
    dtype.

    On a mesh, state and work are divided as `ReklsState` says. Call `init` and `update` under `jit` (they open their own
    `shard_map`) with `param_specs` and a mesh, or with neither where the mesh's axes are Explicit; or inside your own
    `shard_map`, with `param_specs`, on each device's part of everything, gradients averaged over every axis that does not
    divide their parameter. Outside `jit`, every call on a mesh compiles anew. Without a mesh all is as on one device.

    The state is not protected from a gradient that is NaN or infinite: it turns NaN and stays so, as Adam's does. Put
    `optax.apply_if_finite` around the optimizer to skip such steps. In float32 a finite gradient above 1e18 overflows the
    second moment, and the matrix stops moving; clip gradients that can get there.

    A state can be continued on another mesh, and with other numbers, `nesterov`, `eigenbasis`, `precondition_frequency` or
    `numerics`. One made with other `factors`, `inner`, `max_precond_dim`, `mu_dtype`, `dimension_numbers`, or another
    `fallback`, is refused.

    Args:
      learning_rate: a number or an optax schedule. Try one and three times AdamW's; the default `fallback` shares it.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      shampoo_beta: decay of the Kronecker factors, in [0, 1); corrected for its bias towards the first steps.
      eps: added to the denominator, and the least eigenvalue that is inverted. `fallback` adds it too.
      weight_decay: a number or an optax schedule.
      mask: a tree of bools like the params, or a prefix of it, or a callable that makes one from the params: which
        leaves decay. Default: all.
      weight_decay_method: of parameter p at learning rate lr with weight decay wd: "decoupled" subtracts lr·wd·p (AdamW),
        "independent" wd·p, "palm" lr²·wd·p; "l2" adds wd·p to the gradient before everything, the factors included.
      inner: "adam", or "laprop" (arXiv:2002.04839), which normalises the gradient before it is averaged.
      nesterov: Nesterov's momentum, as in `optax.nadam`; in the default `fallback` too.
      max_update_rms: a matrix's update (before the learning rate) of larger root mean square is scaled down to it; of the
        whole matrix, however it is divided. 0 leaves all as they are. Not for leaves of the fallback.
      factors: "kl", Kullback-Leibler as above, or "plain", SOAP's: the means of G Gᵀ/n and Gᵀ G/m.
      eigenbasis: `Eigh()`, or `OrthogonalIteration(power_iterations)`, SOAP's power step and QR decomposition.
      numerics: how the step is kept well-posed; `REFERENCE` reproduces the PyTorch reference.
      precondition_frequency: each matrix gets new bases once in so many steps, every step another share of the matrices;
        factors and moments move at every step. A matrix has the identity, and is Adam's, until its first turn. Where m ≠ n
        the longer side's factor has full rank only after several gradients; round-off chooses the null directions of a basis
        made before, and until the matrix's next turn its updates depend on them: they differ between machines or meshes.
      max_precond_dim: a side longer than this has no factor and stays the identity, beside which the other side's factor is
        the plain one; a matrix with two such sides goes to `fallback`.
      dimension_numbers: `MatrixDimensionNumbers` (or optax's `MuonDimensionNumbers`) for the leaves that are matrices or
        stacks of them, None for those that go to `fallback`: a tree like the params, a prefix of it, or a callable that
        makes one from the params, as `flax_dimension_numbers` does. Default: 2-D leaves are matrices.
      mu_dtype: dtype of the stored first moment. Default: that of the rest of the state. float16 holds no gradient above 6e4
        or below 6e-8; bfloat16 holds those that float32 does.
      fallback: a whole optimizer, with its own learning rate, for the leaves that are no matrices. Default: Adam with the
        same b1, b2, eps, mu_dtype, learning rate and weight decay.
      param_specs: how the parameters lie on the mesh: a tree of `jax.sharding.PartitionSpec` like the params, a prefix of
        it, or a callable that makes one from the params. None in the place of a spec, or nothing: on every device whole.
      mesh: a `jax.sharding.Mesh` or `AbstractMesh`. Default: that of `jax.set_mesh`, or that the arrays lie on.
      eigh_axes: mesh axes over which decompositions are divided. Default: all, data-parallel ones too. Those that divide a
        stack are left out for it: each device decomposes matrices that it holds. Where they are all that divide a matrix,
        and equal matrices are many, whole matrices go to one device each for the step.
      eigh_placement: "split" divides the decompositions over devices; with "replicated" every device does all, as in the
        PyTorch reference, and outside `jit` the result is that of one device bit for bit.

    Returns:
      An optimizer for `optax.chain`, `optax.apply_updates` and the rest of optax.

    Raises:
      ValueError: an argument out of range; at `init`, a mask, specs or dimension numbers that do not fit the params or the
        mesh; at `update`, no params where decay needs them, a state made with other options, gradients or params whose
        structure or shapes are not those that the state was made for, or gradients that differ between devices which hold
        the same part of a parameter.
      TypeError: an argument of the wrong kind; at `init` and `update`, a leaf that is not real floating-point.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from rekls_jax import rekls
      >>> target = jnp.arange(6.0).reshape(3, 2)
      >>> loss = lambda p: jnp.sum((p["w"] - target) ** 2) + jnp.sum(p["b"] ** 2)
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.ones(2)}
      >>> tx = rekls(optax.cosine_decay_schedule(0.3, 200), weight_decay=0.0)
      >>> state = tx.init(params)
      >>> @jax.jit
      ... def step(params, state):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> for _ in range(200):
      ...     params, state = step(params, state)
      >>> bool(loss(params) < 1e-3)
      True
    """
    _checks.number_or_schedule("learning_rate", learning_rate)
    _checks.number_or_schedule("weight_decay", weight_decay)
    _checks.one_of("weight_decay_method", weight_decay_method, METHODS)
    if not callable(weight_decay):
        _checks.non_negative("weight_decay", weight_decay)
    if fallback is not None:
        _checks.instance_of("fallback", fallback, optax.GradientTransformation)
    direction = functools.partial(
        scale_by_rekls,
        b1,
        b2,
        shampoo_beta,
        eps,
        inner=inner,
        nesterov=nesterov,
        max_update_rms=max_update_rms,
        factors=factors,
        eigenbasis=eigenbasis,
        numerics=numerics,
        precondition_frequency=precondition_frequency,
        max_precond_dim=max_precond_dim,
        mu_dtype=mu_dtype,
        mesh=mesh,
        eigh_axes=eigh_axes,
        eigh_placement=eigh_placement,
    )
    direction()  # for its errors
    decays = callable(weight_decay) or not is_zero(weight_decay)

    def routed(params: optax.Params, like: optax.Params, what: str) -> optax.GradientTransformation:
        """For a tree like the params; errors are about `like`, the params or their gradients."""
        # Called here, since inside `partition` they would see but their own leaves. Not without leaves:
        # `optax.tree_map_params` calls `init` with a tree of its own.
        tree, numbers, specs = (
            argument(params) if callable(argument) and jax.tree.leaves(params) else argument
            for argument in (mask, dimension_numbers, param_specs)
        )
        if mask is not None and jax.tree.leaves(params):
            _checks.decay_mask(tree, params)
        directions = {
            "rekls": direction(dimension_numbers=numbers, param_specs=specs),
            "fallback": optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype, nesterov=nesterov),
        }
        finish = METHODS[weight_decay_method]
        optimizers: dict[str, optax.GradientTransformation] = {
            label: in_state_dtype(finish(transform, learning_rate, weight_decay, tree))
            for label, transform in directions.items()
        }
        if fallback is not None:
            optimizers["fallback"] = fallback
        return optax.partition(optimizers, labels(what, like, numbers, specs))

    def labels(what: str, tree: optax.Params, numbers: Any, specs: Any) -> Any:
        """Which of the two optimizers each leaf gets."""
        leaves = _checks.named_leaves(what, tree)
        views = _matrix_view.views(numbers, tree, leaves)
        place = _mesh.find(mesh, leaves, specs_given=specs is not None)
        layouts = _mesh.layouts(leaves, views, _mesh.specs_of(specs, tree, leaves, place), place, int(max_precond_dim))
        each = ["fallback" if layout is None else "rekls" for layout in layouts]
        return jax.tree.unflatten(jax.tree.structure(tree), each)

    def init(params: optax.Params) -> optax.OptState:
        _checks.floating_leaves("parameter", params)
        return routed(params, params, "parameter").init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        like = _like_params(state, own_fallback=fallback is None)
        _checks.floating_leaves("gradient", updates)
        _checks.same_shapes("gradient", updates, like)
        if params is not None:
            _checks.same_shapes("parameter", params, like)
        elif decays:
            advice = _checks.static_advice("weight_decay") if isinstance(weight_decay, jax.Array) else ""
            raise ValueError(
                "`update` needs `params` for weight decay, got None: call `tx.update(gradients, state, params)`, or pass "
                f"`weight_decay=0.0`.{advice}"
            )
        tx = routed(updates if params is None else params, updates, "gradient")
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _like_params(state: optax.OptState, *, own_fallback: bool) -> Any:
    """A tree like the params, from the first moments. Of the leaves of a given fallback only the place is known."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    _checks.own_state(state, set(getattr(state, "inner_states", ())) == {"rekls", "fallback"})
    like = optax.tree.get(state.inner_states["rekls"], "mu")
    if own_fallback:
        others = optax.tree.get(state.inner_states["fallback"], "mu")
        _checks.own_state(state, others is not None, " with another fallback's")
    else:
        others = jax.tree.map(lambda _: _checks.ANY_SHAPE, like, is_leaf=is_masked)
    return jax.tree.map(lambda a, b: b if is_masked(a) else a, like, others, is_leaf=is_masked)
